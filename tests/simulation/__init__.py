"""A seeded simulation of the whole pipeline: the services' own code on an event loop of virtual time."""
