"""What runs inside a rank: the run context, its channel, data slices, collectives."""
