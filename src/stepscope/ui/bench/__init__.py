"""Run the workloads of `stepscope bench` under capture and put the results in a table."""
