"""SGLang servers: starting, watching, restarting, and the HTTP requests in front of them."""
