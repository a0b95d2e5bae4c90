"""The configuration: one strict YAML file, the environment's overrides, errors that name their fix."""

from gateway.config.changes import changes, refused
from gateway.config.forms import split_address
from gateway.config.keys import decode_key
from gateway.config.load import digest, for_command, for_upstream, load, parse
from gateway.config.model import (
    Cache,
    Config,
    Hold,
    Legs,
    Limits,
    Log,
    Principal,
    Replica,
    Route,
    Security,
    Sessions,
    State,
    Timeouts,
    Upstream,
)
from gateway.config.problems import ConfigError
from gateway.config.schema import json_schema

__all__ = [
    "Cache",
    "Config",
    "ConfigError",
    "Hold",
    "Legs",
    "Limits",
    "Log",
    "Principal",
    "Replica",
    "Route",
    "Security",
    "Sessions",
    "State",
    "Timeouts",
    "Upstream",
    "changes",
    "decode_key",
    "digest",
    "for_command",
    "for_upstream",
    "json_schema",
    "load",
    "parse",
    "refused",
    "split_address",
]
