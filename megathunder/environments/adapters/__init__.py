"""Environments of other packages, by name. Each package is optional and imported when its name is used."""
