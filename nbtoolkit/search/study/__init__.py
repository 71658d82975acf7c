"""What a sweep searches and has found: space, samplers, study, trials."""
