import torch
from pipeline_training import alone, staged, compare
def _s(*a): return staged(*a)
def test_64(ranks):
    e=alone("llama",steps=20,batch=8,microbatches=4,dtype=torch.float64)
    r=ranks(_s,4,"llama",20,8,True,torch.float64,config=dict(partitions=4,microbatches=4,pipeline="simple",auto_partition=False,default_partition=0),timeout=250)
    worst=0
    for x in r:
        for st in range(20):
            for n,g in x["gradients"][st].items(): worst=max(worst,float((g-e["gradients"][st][n]).abs().max()))
    print("WORST64",worst)
