"""How stepscope speaks: the command line, the terminal, the HTML report, the JSON contract."""
