from monarch.actor import Actor, endpoint


class A(Actor):
    @endpoint
    def f(self, x):
        return x + 1


def test_a(procs):
    a = procs(2).spawn("a", A)
    assert list(a.f.call(1).get(timeout=20).values()) == [2, 2]


def test_b(procs):
    a = procs({"a": 2, "b": 2}).spawn("a", A)
    assert list(a.f.call(1).get(timeout=20).values()) == [2] * 4


def test_p(program):
    assert program("print(1)").ok() == "1\n"
