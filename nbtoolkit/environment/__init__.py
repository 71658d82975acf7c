"""What a launch may use: devices, CPUs, memory, time; and the plan made from it."""
