"""Discovery and loading: what is found, and how each way of being unusable is told."""

from __future__ import annotations

import sys

import pytest
from plugin_folder import PluginFolder, backend_source

import hyv4_kvdequant as h
from hyv4_kvdequant import registry
from hyv4_kvdequant.probe import probe_backends

TARGET = h.Target.detect("cpu")


def test_torch_is_registered_by_this_distribution() -> None:
    (claim,) = registry.registered_backends()["torch"]
    assert (claim.distribution, claim.version) == ("hyv4-kvdequant", h.__version__)


def test_listing_imports_no_backend(plugins: PluginFolder) -> None:
    plugins.install("acme-kernels", "acme_listed", backend_source("acme"), "acme")
    assert "acme" in registry.registered_backends()
    assert "acme_listed" not in sys.modules


def test_a_third_party_backend_loads(plugins: PluginFolder) -> None:
    plugins.install("acme-kernels", "acme_loads", backend_source("acme"), "acme")
    assert h.load_backend("acme").name == "acme"


def test_a_plugin_installed_while_running_is_seen_at_once(plugins: PluginFolder) -> None:
    with pytest.raises(h.UnknownBackendError):
        h.load_backend("late")
    plugins.install("late-kernels", "late_plugin", backend_source("late"), "late")
    assert h.load_backend("late").name == "late"


def test_unknown_name_has_the_nearest_match_and_what_is_installed() -> None:
    with pytest.raises(h.UnknownBackendError) as caught:
        h.load_backend("torhc", "the environment variable X")
    message = str(caught.value)
    assert "'torhc'" in message
    assert "the environment variable X" in message
    assert "Did you mean 'torch'?" in message
    assert "torch (hyv4-kvdequant" in message
    assert "What to do" in message


@pytest.mark.parametrize("name", ["", " ", "Torch", "torch ", "to rch", "../torch", "torch\n", "1torch", "тorch"])
def test_odd_names_are_told_the_rule(name: str) -> None:
    with pytest.raises(h.ConfigurationError, match="a lower-case letter, then"):
        h.load_backend(name)


def test_two_distributions_with_one_name_are_both_named(plugins: PluginFolder) -> None:
    plugins.install("acme-one", "acme_one", backend_source("acme"), "acme")
    plugins.install("acme-two", "acme_two", backend_source("acme"), "acme")
    with pytest.raises(h.BackendConflictError) as caught:
        h.load_backend("acme")
    assert "acme-one 1.2" in str(caught.value)
    assert "acme-two 1.2" in str(caught.value)
    assert h.load_backend("torch").name == "torch"


def test_two_distributions_with_one_entry_point_word_for_word_conflict_too(plugins: PluginFolder) -> None:
    plugins.install("acme-one", "acme_same", backend_source("acme"), "acme")
    plugins.install("acme-fork", "acme_same", backend_source("acme"), "acme")
    with pytest.raises(h.BackendConflictError, match="acme-fork"):
        h.load_backend("acme")


BROKEN = {
    "import": ("raise OSError('libvendor.so.7: cannot open shared object file')", "libvendor.so.7"),
    "exit": ("import sys; sys.exit('not on this machine')", "SystemExit: not on this machine"),
    "attribute": ("x = 1", "Backend"),
    "not_a_class": ("Backend = 3", "not a subclass"),
    "foreign_class": ("class Backend: name = 'broken'", "not a subclass"),
    "abstract": (
        "from hyv4_kvdequant import GatherDequantBackend\nclass Backend(GatherDequantBackend): name = 'broken'",
        "abstract: gather_dequant, unavailable_reasons",
    ),
    "api_version": (backend_source("broken", api_version=2), "api_version 2"),
    "other_name": (backend_source("other"), "Its own name is 'other'"),
    "features": (backend_source("broken").replace("features = Features()", "features = 1"), "features"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_unusable_code_is_refused_with_the_cause(plugins: PluginFolder, kind: str) -> None:
    source, expected = BROKEN[kind]
    plugins.install("broken-kernels", f"broken_{kind}", source, "broken")
    with pytest.raises(h.BackendLoadError) as caught:
        h.load_backend("broken")
    assert expected in str(caught.value)
    assert "broken-kernels 1.2" in str(caught.value)
    assert "What to do" in str(caught.value)


def test_the_cause_of_a_failed_import_is_chained(plugins: PluginFolder) -> None:
    plugins.install("broken-kernels", "broken_chained", "raise ZeroDivisionError('boom')", "broken")
    with pytest.raises(h.BackendLoadError) as caught:
        h.load_backend("broken")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_broken_plugin_harms_nobody_else_and_shows_its_cause(plugins: PluginFolder) -> None:
    plugins.install("broken-kernels", "broken_listed", "raise ImportError('no libfoo')", "broken")
    plugins.install("odd-kernels", "odd_listed", backend_source("Odd"), "Odd")
    probes = {probe.name: probe for probe in probe_backends(TARGET)}
    assert probes["torch"].available
    assert not probes["broken"].available
    assert "no libfoo" in (probes["broken"].problem or "")
    assert "a lower-case letter" in (probes["Odd"].problem or "")


def test_an_import_that_hangs_is_bounded(plugins: PluginFolder) -> None:
    plugins.install("slow-kernels", "slow_plugin", "import time; time.sleep(3)", "slow")
    probes = {probe.name: probe for probe in probe_backends(TARGET, timeout_s=0.2)}
    assert "did not finish within 0.2 s" in (probes["slow"].problem or "")
    assert probes["torch"].available


def test_what_a_plugin_prints_stays_out_of_standard_output(
    plugins: PluginFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.install("loud-kernels", "loud_plugin", "print('hello')\n" + backend_source("loud"), "loud")
    h.load_backend("loud")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err


def _run_time_class(backend_name: str) -> type[h.GatherDequantBackend]:
    class RunTime(h.load_backend("torch")):  # type: ignore[misc]
        name = backend_name

    return RunTime


def test_run_time_registration_under_the_same_rules() -> None:
    backend = _run_time_class("notebook")
    with registry.temporarily_registered(backend):
        assert h.load_backend("notebook") is backend
        with pytest.raises(h.BackendConflictError, match="notebook"):
            h.register_backend(_run_time_class("notebook"))
    with pytest.raises(h.UnknownBackendError):
        h.load_backend("notebook")


def test_run_time_registration_cannot_take_an_installed_name() -> None:
    with pytest.raises(h.BackendConflictError, match="hyv4-kvdequant"):
        h.register_backend(_run_time_class("torch"))


@pytest.mark.parametrize("name", ["", "Bad Name"])
def test_run_time_registration_checks_the_name(name: str) -> None:
    with pytest.raises(h.ConfigurationError):
        h.register_backend(_run_time_class(name))


def test_an_entry_point_cannot_be_unregistered() -> None:
    with pytest.raises(h.UnknownBackendError):
        h.unregister_backend("torch")
