"""Bundle to a folder for an iPhone app, and the checks that prove it."""
