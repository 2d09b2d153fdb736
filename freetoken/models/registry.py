"""The families we have, by architecture name, and the way from a config to a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from freetoken.errors import ConfigError
from freetoken.models import hf, llama, mistral, mixtral, olmoe, qwen2, qwen3, qwen3_moe
from freetoken.models.spec import DecoderSpec, WeightMap


@dataclass(frozen=True, slots=True)
class Family:
    """One model file as the loader sees it."""

    architectures: tuple[str, ...]
    config_type: type[hf.DecoderConfig]
    spec: Callable[[Any], DecoderSpec]
    """Takes a `config_type`."""
    weights: WeightMap

    def describe(self, config: Mapping[str, Any]) -> DecoderSpec:
        """Check a config, make its spec. ConfigError: key missing, of wrong type, not supported."""
        try:
            checked = msgspec.convert(dict(config), self.config_type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the model's config.json is not usable: {error}") from error
        return self.spec(checked)


FAMILIES = (
    Family(llama.ARCHITECTURES, llama.HfConfig, llama.spec, llama.WEIGHTS),
    Family(mistral.ARCHITECTURES, mistral.HfConfig, mistral.spec, mistral.WEIGHTS),
    Family(mixtral.ARCHITECTURES, mixtral.HfConfig, mixtral.spec, mixtral.WEIGHTS),
    Family(olmoe.ARCHITECTURES, olmoe.HfConfig, olmoe.spec, olmoe.WEIGHTS),
    Family(qwen2.ARCHITECTURES, qwen2.HfConfig, qwen2.spec, qwen2.WEIGHTS),
    Family(qwen3.ARCHITECTURES, qwen3.HfConfig, qwen3.spec, qwen3.WEIGHTS),
    Family(qwen3_moe.ARCHITECTURES, qwen3_moe.HfConfig, qwen3_moe.spec, qwen3_moe.WEIGHTS),
)

BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def family_of(config: Mapping[str, Any]) -> Family:
    """Find the family of a config, or say in one line what it is and what is supported."""
    named: list[str] = config.get("architectures") or []
    for name in named:
        if name in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[name]
    what = ", ".join(map(str, named)) or f"none (model_type {config.get('model_type', 'absent')})"
    raise ConfigError(
        f"model architecture {what} is not supported;"
        f" supported: {', '.join(sorted(BY_ARCHITECTURE))}"
    )
