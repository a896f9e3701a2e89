"""The edge: HTTP in, messages to the actors, HTTP out. Handlers are thin."""
