"""Prints the configuration's JSON Schema: `python -m gateway.config > config/mrtr-gateway.schema.json`."""

import json
import sys

from gateway.config.schema import json_schema

sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
