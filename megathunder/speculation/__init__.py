"""Suffix speculation: an SGLang plug-in that drafts from earlier trajectories and never changes what is sampled.

    in the server    plugin (entry point) -> worker -> drafter (cache, gate) and rows (layout, acceptance)
    in the run       controller (regime by load) -> POST /set_internal_state;  GET /server_info -> `speculation`

A draft is verified by decoding it: request i takes 1 + k_i rows of one ordinary decode batch, row j holding the
context up to draft token j. Every row is sampled as a request of its own would be (any temperature, top-p, top-k,
min-p; its own seed), and a draft token is kept while it equals what the row before it sampled. What is emitted is
therefore a sample of the policy whatever was drafted, each token with the log-probability its row gave it. There is no
tree and no accept kernel.
"""
