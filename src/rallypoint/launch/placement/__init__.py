"""Who runs where: clusters, ranks, variables, addresses, CPUs."""
