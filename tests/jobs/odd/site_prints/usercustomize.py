print("the job's usercustomize:", __name__, flush=True)
