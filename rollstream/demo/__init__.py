"""``rollstream demo``: composes the services into a run that a person can watch."""
