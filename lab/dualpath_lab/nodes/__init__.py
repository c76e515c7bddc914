"""A cluster on one Linux machine, each node with a shaped compute NIC and a throttled storage NIC.

settings        the settings of a lab
machine         what this machine supports, and the names of everything in a lab
s3_server       the S3 server of a lab: program, keys, command
steps           the steps that make a lab and the steps that remove it, as data
leftovers       the parts of a lab that exist, found by name
runner          executes steps
cluster         up, status and down
janitor         a temporary lab, removed even if its process is killed
node_processes  processes on the nodes
"""
