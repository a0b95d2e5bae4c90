"""What the sessions of one HTTP upstream share."""

from typing import NamedTuple

from gateway.http.upstream_client import Client
from gateway.http.upstream_url import Endpoint
from gateway.runtime.tasks import Tasks


class HttpUpstream(NamedTuple):
    """One upstream, with the means to speak to it."""

    client: Client
    endpoint: Endpoint
    tasks: Tasks
