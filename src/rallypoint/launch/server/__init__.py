"""The fork server and the supervisor's handle on it, with templates, stores and warm servers."""
