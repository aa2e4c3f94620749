"""Publication: the learner's new weights reach every rollout server, acknowledged, before the next rollout starts."""
