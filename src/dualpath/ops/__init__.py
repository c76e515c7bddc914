"""Around the processes: launching a cluster, checks of a node, settings of a fabric."""
