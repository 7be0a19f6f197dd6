print("the dataclasses of the job is imported")
