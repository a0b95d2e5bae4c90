"""The processes of a gateway: start, reload, drain, supervision."""
