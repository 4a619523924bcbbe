"""Where the clients live: in this process, or at real sites."""
