"""Settings: environment variables first, vLLM's `--additional-config` second, each with its source.

A variable under our prefix that nobody knows, and a value that cannot be read, are errors: a setting that is
silently ignored would be a wrong answer later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field, PrivateAttr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from hyv4_kvdequant.contract import ConfigurationError
from hyv4_kvdequant.suggest import did_you_mean

GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"
PREFIX = GATE + "_"
ADDITIONAL_CONFIG_KEY = "hyv4_kvdequant"

_EXPECTED = {
    "bool": "1, true, yes or on; or 0, false, no or off",
    "int": "a whole number",
    "path": "a folder's path",
    "string": "a name",
}


def _not_empty(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("it is set but empty; unset it, or give it a value")
    return value


_NotEmpty = BeforeValidator(_not_empty)


class Settings(BaseSettings):
    """Every setting, with vLLM's conventions for booleans. Made by `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, populate_by_name=True, case_sensitive=False
    )

    enabled: Annotated[bool, _NotEmpty] = Field(
        default=False,
        validation_alias=AliasChoices(GATE, "enabled"),
        description="The gate: intercept HY V4's fp8 attention and dequantize its KV cache to BF16.",
    )
    backend: Annotated[str | None, _NotEmpty] = Field(
        default=None,
        description="Backend by name. Default: the platform's (HCU `lightop`; CUDA and ROCm `triton`; CPU `torch`).",
    )
    shadow: Annotated[str | None, _NotEmpty] = Field(
        default=None, description="A second backend that runs beside the first and is compared with it."
    )
    workspace_mb: Annotated[int, _NotEmpty] = Field(
        default=1024, gt=0, description="Upper bound of the BF16 buffers on a device, in MiB."
    )
    report_dir: Annotated[Path | None, _NotEmpty] = Field(
        default=None, description="Folder for reports and traces; made if it does not exist."
    )
    report_group_readable: Annotated[bool, _NotEmpty] = Field(
        default=False,
        description="Let the group read reports and traces, not the owner alone; traces hold parts of the KV cache.",
    )

    shadow_every: Annotated[int, _NotEmpty] = Field(
        default=1, gt=0, description="In eager mode, compare every Nth call; in a graph, fixed at capture."
    )
    trace: Annotated[int, _NotEmpty] = Field(
        default=0, ge=0, description="Record the first N intercepted calls; with `trace_on_mismatch`, N of those."
    )
    trace_on_mismatch: Annotated[bool, _NotEmpty] = Field(
        default=False, description="Record only calls in which the shadow differs (eager mode)."
    )
    trace_queries: Annotated[bool, _NotEmpty] = Field(default=False, description="Record queries too.")
    trace_mb: Annotated[int, _NotEmpty] = Field(default=256, gt=0, description="Upper bound of all traces, in MiB.")

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
        return env_settings, init_settings

    def source(self, field: str) -> str:
        """Where a field's value came from: an environment variable, `--additional-config`, or the default."""
        return self._sources[field]


def variable_name(field: str) -> str:
    """The environment variable of a settings field."""
    return GATE if field == "enabled" else PREFIX + field.upper()


def variable_names() -> dict[str, str]:
    """Environment variable of every field: {variable: field}."""
    return {variable_name(field): field for field in Settings.model_fields}


def load_settings(additional_config: Mapping[str, Any] | None = None) -> Settings:
    """Reads the settings of this process.

    Args:
        additional_config: the object under `hyv4_kvdequant` in vLLM's `--additional-config`, if any. Keys are
            the variables' names in lower case without the prefix. The environment wins over it. The gate cannot
            stand here: it is read in every process before vLLM's configuration exists.

    Raises:
        ConfigurationError: an unknown variable or key (with the nearest known name), or a value that cannot be read.
    """
    config = dict(additional_config or {})
    _reject_unknown(config)
    try:
        settings = Settings(**config)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, config)) from None
    settings._sources.update({field: _source(field, config) for field in Settings.model_fields})
    return settings


def _reject_unknown(config: Mapping[str, Any]) -> None:
    variables = variable_names()
    for variable in sorted(os.environ):
        if variable.upper().startswith(GATE) and variable.upper() not in variables:
            raise ConfigurationError(
                f"The environment variable {variable} is not one of ours.{did_you_mean(variable, variables)}\n"
                f"Known: {', '.join(variables)}.\nWhat to do: correct its name or unset it."
            )
    if "enabled" in config:
        raise ConfigurationError(
            f"'enabled' under {ADDITIONAL_CONFIG_KEY!r} in --additional-config cannot be honoured: the gate is read in "
            f"every process before vLLM's configuration exists. What to do: set the environment variable {GATE}=1."
        )
    fields = [field for field in Settings.model_fields if field != "enabled"]
    for key in config:
        if key not in fields:
            raise ConfigurationError(
                f"{key!r} under {ADDITIONAL_CONFIG_KEY!r} in --additional-config is not a setting."
                f"{did_you_mean(str(key), fields)}\nKnown: {', '.join(fields)}."
            )


def _source(field: str, config: Mapping[str, Any]) -> str:
    if variable_name(field) in {variable.upper() for variable in os.environ}:
        return f"the environment variable {variable_name(field)}"
    if field in config:
        return f"{ADDITIONAL_CONFIG_KEY!r} in --additional-config"
    return "the default"


def _explain(error: ValidationError, config: Mapping[str, Any]) -> str:
    lines = []
    for problem in error.errors():
        given = str(problem["loc"][0])
        field = "enabled" if given == GATE else given.lower().removeprefix(PREFIX.lower())
        kind = problem["type"].split("_")[0]
        expected = _EXPECTED.get(kind, problem["msg"].removeprefix("Value error, "))
        lines.append(
            f"{_source(field, config)} has the value {problem['input']!r}, which cannot be read. Expected: {expected}."
        )
    return "\n".join(line[0].upper() + line[1:] for line in lines)
