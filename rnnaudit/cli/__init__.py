"""The command line: parse, call, print, exit; nothing else does, or reads the environment."""
