"""Runs a history when it is imported, so that processes which are forked after that find their caches filled."""

from tests.simulation import campaign
from tests.simulation.history import History
from tests.simulation.plan import draw

_ = campaign.complaints(History(draw(0)).run())
