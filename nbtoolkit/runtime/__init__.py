"""From a config to finished ranks: host, hardware, plan, launch, launchpad, owner, worker."""
