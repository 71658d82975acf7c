"""Settings: schema, YAML layers, validation."""
