"""The machines of a lab: namespaces with a first process, a network, a file tree, and power."""
