"""The hypothesis profiles: one that draws the same values on every machine, one that explores.

`repeatable` is what `make test` and CI use: a test draws what its own source says, and so it passes or fails for
everybody. `explore` is what `make fuzz` uses: new examples each time, and what they find becomes an explicit example.
"""

from typing import Final

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

REPEATABLE: Final = "repeatable"
EXPLORE: Final = "explore"


def install() -> None:
    """Load `repeatable`; `--hypothesis-profile=explore` chooses the other one later."""
    # Deadlines and the health check of slow data measure the machine.
    settings.register_profile(
        REPEATABLE,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
    settings.register_profile(EXPLORE, settings.get_profile(REPEATABLE), derandomize=False, max_examples=500)
    settings.load_profile(REPEATABLE)
    # Hypothesis also draws constants from the loaded modules, and which modules are loaded depends on which
    # tests run in this process.
    providers._get_local_constants = lambda: _NONE


_NONE: Final = Constants()
