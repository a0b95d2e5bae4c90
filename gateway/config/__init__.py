"""The configuration: one strict YAML file with overrides from the environment."""

from gateway.config.advisories import cautions, notes, reload_command
from gateway.config.files import contents
from gateway.config.in_force import InForce
from gateway.config.load import ConfigFile, digest, for_command, for_upstream, load, parse, with_log_level
from gateway.config.model.config import Config, Hold, Limits, Principal, Replica, Security, State, Timeouts
from gateway.config.model.route import DPOP, Route, Upstream, UpstreamTls
from gateway.config.model.value_types import Era, Level
from gateway.config.parsing.formats import HOP_BY_HOP, redacted_url, sendable_header, split_address
from gateway.config.parsing.problems import ConfigError, Problem, unusable
from gateway.config.parsing.state_keys import KEY_BYTES
from gateway.config.reloadable import RESTART, changes
from gateway.config.route_overrides import RouteSettings, on_route
from gateway.config.tls import Contexts, Validity, contexts, validity
