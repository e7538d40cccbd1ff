"""Sessions: settings, the connection to the agent, the ranks' agreement, notices."""
