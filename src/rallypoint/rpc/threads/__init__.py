"""The threads of an agent, what they wait for, and what they do beside calls."""
