"""Parts of the gateway that its core never imports, each a folder."""
