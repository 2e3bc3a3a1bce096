"""How a process finds out who it is, and joins the others: launcher's environment, port, attempt, hosts that sit out."""
