"""The coordinator process: everything of a run but the gradients, wired together and driven by `loop.train`."""
