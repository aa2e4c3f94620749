"""A local page to look at what the policy did: `megathunder view runs/NAME`."""
