"""Programs that ask a scripted server as people do: `python FILE ADDRESS`, with the packages of
`make clients`. Each ends with an error if an answer is not as it should be.
"""
