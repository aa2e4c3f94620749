"""The learner's model against transformers, layout by layout."""
