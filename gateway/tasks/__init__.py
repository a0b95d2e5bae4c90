"""Tools that run as tasks: driven for clients without the extension, handed to clients with it."""
