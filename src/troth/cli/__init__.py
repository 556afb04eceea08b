"""Ring 3: the command line. Help answers without loading torch; every command is a module loaded when it runs."""
