"""Settings: environment variables first, vLLM's `--additional-config` second, each with its source.

Nothing but the names in `variable_names()` is read, letter for letter. A variable or key that is nearly one of ours,
and a value that cannot be read, are errors: a setting that is silently ignored would be a wrong answer later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from hyv4_kvdequant import variables
from hyv4_kvdequant.contract import ConfigurationError
from hyv4_kvdequant.suggest import did_you_mean

GATE = variables.GATE
PREFIX = variables.PREFIX
ADDITIONAL_CONFIG_KEY = "hyv4_kvdequant"

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Accepts:
    """What a setting accepts: in words, for messages and docs/settings.md, and as the function that holds it to them.

    Attributes:
        words: continues "expected ...".
        read: the value from an environment variable's text or from JSON; ValueError when it is not what `words` say.
    """

    words: str
    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{self.words}; it is set but empty: unset it, or give it a value")
        try:
            return self.read(value)
        except ValueError as error:
            # What the function has to add is said after what is accepted.
            raise ValueError(f"{self.words}{f' ({error})' if error.args else ''}") from None


def _read_switch(value: Any) -> bool:
    # JSON's 1 and 0 are the spellings 1 and 0; 1.0 is neither.
    text = str(value).lower() if isinstance(value, (str, bool, int)) else ""
    if text not in (*TRUE, *FALSE):
        raise ValueError
    return text in TRUE


def _whole_number(least: int) -> Accepts:
    def read(value: Any) -> int:
        text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
        # 18 digits: everything that is made of it, bytes from MiB included, stays a number Python reads at once.
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise ValueError
        return int(text)

    return Accepts(f"a whole number of at least {least}, in digits", read)


def _read_name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError
    return value


def _read_folder(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, Path)) or "\0" in str(value):
        raise ValueError
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # no such user, or no home
        raise ValueError(str(error)) from None


Switch = Annotated[bool, Accepts(f"{', '.join(TRUE)}; or {', '.join(FALSE)}, in any letter case", _read_switch)]
Name = Annotated[str | None, Accepts("a backend's name", _read_name)]
Folder = Annotated[Path | None, Accepts("a folder's path, where ~ is the home folder", _read_folder)]
WholeNumber = Annotated[int, _whole_number(0)]
PositiveNumber = Annotated[int, _whole_number(1)]


class _Environment(PydanticBaseSettingsSource):
    """Our variables under their exact names. pydantic-settings' own source would also read fields' bare names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return os.environ.get(variable_name(field_name)), field_name, False

    def __call__(self) -> dict[str, Any]:
        return {field: os.environ[variable] for variable, field in variable_names().items() if variable in os.environ}


class Settings(BaseSettings):
    """Every setting. Made by `load_settings`."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    enabled: Switch = Field(
        default=False,
        description="The gate: intercept HY V4's fp8 attention and dequantize its KV cache to BF16.",
    )
    backend: Name = Field(
        default=None,
        description="Backend by name. Default: the platform's (HCU `lightop`; CUDA and ROCm `triton`; CPU `torch`).",
    )
    shadow: Name = Field(
        default=None, description="A second backend that runs beside the first and is compared with it."
    )
    workspace_mb: PositiveNumber = Field(
        default=1024, description="Upper bound of the BF16 buffers on a device, in MiB."
    )
    report_dir: Folder = Field(default=None, description="Folder for reports and traces; made if it does not exist.")
    report_group_readable: Switch = Field(
        default=False,
        description="Let the group read reports and traces, not the owner alone; traces hold parts of the KV cache.",
    )

    shadow_every: PositiveNumber = Field(
        default=1, description="In eager mode, compare every Nth call; in a graph, fixed at capture."
    )
    trace: WholeNumber = Field(
        default=0, description="Record the first N intercepted calls; with `trace_on_mismatch`, N of those."
    )
    trace_on_mismatch: Switch = Field(
        default=False, description="Record only calls in which the shadow differs (eager mode)."
    )
    trace_queries: Switch = Field(default=False, description="Record queries too.")
    trace_mb: PositiveNumber = Field(default=256, description="Upper bound of all traces, in MiB.")

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return _Environment(settings_cls), init_settings

    def source(self, field: str) -> str:
        """Where a field's value came from: an environment variable, `--additional-config`, or the default."""
        return self._sources[field]


def variable_name(field: str) -> str:
    """The environment variable of a settings field."""
    return GATE if field == "enabled" else PREFIX + field.upper()


def variable_names() -> dict[str, str]:
    """Environment variable of every field: {variable: field}."""
    return {variable_name(field): field for field in Settings.model_fields}


def accepted(field: str) -> str:
    """What a field accepts, in words."""
    return next(item.words for item in Settings.model_fields[field].metadata if isinstance(item, Accepts))


def load_settings(additional_config: Mapping[str, Any] | None = None) -> Settings:
    """Reads the settings of this process.

    Args:
        additional_config: the object under `hyv4_kvdequant` in vLLM's `--additional-config`, if any. Keys are
            the variables' names in lower case without the prefix. The environment wins over it. The gate cannot
            stand here: it is read in every process before vLLM's configuration exists.

    Raises:
        ConfigurationError: an unknown variable or key (with the nearest known name), or a value that cannot be read.
    """
    if additional_config is not None and not isinstance(additional_config, Mapping):
        raise ConfigurationError(
            f"{ADDITIONAL_CONFIG_KEY!r} in --additional-config is {additional_config!r}; expected an object of settings"
            f""", such as {{"{ADDITIONAL_CONFIG_KEY}": {{"workspace_mb": 512}}}}."""
        )
    config = dict(additional_config or {})
    _reject_unknown_variables()
    _reject_unknown_keys(config)
    try:
        settings = Settings(**config)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, config)) from None
    settings._sources.update({field: _source(field, config) for field in Settings.model_fields})
    return settings


def load_settings_of(vllm_additional_config: object) -> Settings:
    """`load_settings` from the whole of vLLM's `--additional-config`, where other plugins' keys stand beside ours.

    Args:
        vllm_additional_config: `VllmConfig.additional_config`. An object of another platform's own class holds
            nothing of ours.

    Raises:
        ConfigurationError: as `load_settings`; the configuration is a list, text or number; a key is nearly ours, or
            is one of our settings outside of our key.
    """
    if isinstance(vllm_additional_config, (str, bytes, list, tuple, set, int, float)):
        raise ConfigurationError(
            f"--additional-config is {vllm_additional_config!r}; expected an object, in which our settings stand under "
            f"{ADDITIONAL_CONFIG_KEY!r}."
        )
    whole = vllm_additional_config if isinstance(vllm_additional_config, Mapping) else {}
    for key in whole:
        _reject_near_key(str(key))
    return load_settings(whole.get(ADDITIONAL_CONFIG_KEY))


def _reject_near_key(key: str) -> None:
    if key == ADDITIONAL_CONFIG_KEY:
        return
    plain = key.replace("-", "_").lower()
    if plain in _config_fields():
        raise ConfigurationError(
            f"{key!r} in --additional-config stands outside of {ADDITIONAL_CONFIG_KEY!r}, where nobody reads it.\n"
            f"""What to do: write {{"{ADDITIONAL_CONFIG_KEY}": {{"{plain}": ...}}}}."""
        )
    if variables.is_like_ours(key) or _is_like_our_key(plain):
        raise ConfigurationError(
            f"{key!r} in --additional-config is nearly our key. Did you mean {ADDITIONAL_CONFIG_KEY!r}?\n"
            "What to do: correct it, or leave it out."
        )


def _is_like_our_key(plain: str) -> bool:
    """Whether a key, in lower case with underscores, is ours but for a few letters. Another digit is another model."""
    joined = plain.replace("_", "")
    quantizes = "quant" in joined and "dequant" not in joined
    same_digits = re.sub(r"[^0-9]", "", joined) in ("4", "48")  # with or without fp8
    return same_digits and not quantizes and bool(did_you_mean(joined, ["hyv4kvdequant"], cutoff=0.85))


def _config_fields() -> list[str]:
    return [field for field in Settings.model_fields if field != "enabled"]


def _reject_unknown_variables() -> None:
    known = variable_names()
    for variable in sorted(os.environ):
        if variable not in known and variables.is_like_ours(variable):
            raise ConfigurationError(
                f"The environment variable {variable} is not one of ours."
                f"{did_you_mean(variable.upper(), known)}\n"
                f"Known, in exactly these letters: {', '.join(known)}.\nWhat to do: correct its name or unset it."
            )


def _reject_unknown_keys(config: Mapping[str, Any]) -> None:
    if "enabled" in config:
        raise ConfigurationError(
            f"'enabled' under {ADDITIONAL_CONFIG_KEY!r} in --additional-config cannot be honoured: the gate is read in "
            f"every process before vLLM's configuration exists. What to do: set the environment variable {GATE}=1."
        )
    fields = _config_fields()
    for key in config:
        if key not in fields:
            raise ConfigurationError(
                f"{key!r} under {ADDITIONAL_CONFIG_KEY!r} in --additional-config is not a setting."
                f"{did_you_mean(str(key), fields)}\nKnown: {', '.join(fields)}."
            )


def _source(field: str, config: Mapping[str, Any]) -> str:
    if variable_name(field) in os.environ:
        return f"the environment variable {variable_name(field)}"
    if field in config:
        return f"{field!r} under {ADDITIONAL_CONFIG_KEY!r} in --additional-config"
    return "the default"


def _explain(error: ValidationError, config: Mapping[str, Any]) -> str:
    lines = []
    for problem in error.errors():
        source = _source(str(problem["loc"][0]), config)
        expected = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{source} has the value {problem['input']!r}, which cannot be read. Expected: {expected}.")
    return "\n".join(line[0].upper() + line[1:] for line in lines)
