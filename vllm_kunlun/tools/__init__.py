"""Libraries behind the command line. Each tool is a module or package of its own, imported when its command runs."""
