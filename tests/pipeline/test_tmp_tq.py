import torch, pytest
import pipeline_training as pt
def _t5():
    import os
    from smp_runtime.pipeline import remote, server
    B=server.ModuleServer._backward
    def back(self, task, b):
        if b.microbatch==0: print('BACK', self._hub.stage, task.label, b.path, [(s and (s.name, s.comes)) for s in b.slots], flush=True)
        return B(self, task, b)
    server.ModuleServer._backward=back
    RB=remote.RemoteCall.backward
    def rb(self, g):
        if self._microbatch==0: print('RB', self._hub.stage, self._module, self._path, str(self._hub.conductor.current), flush=True)
        return RB(self, g)
    remote.RemoteCall.backward=rb
    try: return pt.staged('t5', 2, 4, True)['replayed']
    finally:
        remote.RemoteCall.backward=RB; server.ModuleServer._backward=B
def test_t5(ranks):
    ranks(_t5,2,config=dict(partitions=2,microbatches=1,auto_partition=False,default_partition=0))
