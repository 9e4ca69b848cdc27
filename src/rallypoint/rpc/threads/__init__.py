"""The threads of an agent, the events they wait for, and background tasks."""
