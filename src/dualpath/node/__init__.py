"""What a process knows of its machine: its identity, secrets and directories, and system calls."""
