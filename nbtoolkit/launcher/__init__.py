"""Processes: fork server, supervisor, agent, worker group."""
