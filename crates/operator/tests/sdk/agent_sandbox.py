"""What users of agent-sandbox's client do, from the first claim to the last delete, with the client as it is on PyPI.

The cluster is the one of KUBECONFIG; main.rs says what is in it. Argument: which part. One line for each step.
"""

import asyncio
import faulthandler
import io
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import yaml
from k8s_agent_sandbox import AsyncSandboxClient, SandboxClient
from k8s_agent_sandbox.exceptions import (
    SandboxClaimFailedError,
    SandboxNotFoundError,
    SandboxRequestError,
    SandboxTemplateNotFoundError,
    SandboxWarmPoolNotFoundError,
)
from k8s_agent_sandbox.gke_extensions.snapshots import PodSnapshotSandboxClient
from k8s_agent_sandbox.models import (
    SandboxdInClusterConnectionConfig,
    SandboxDirectConnectionConfig,
    SandboxdPodTunnelConnectionConfig,
    SandboxInClusterConnectionConfig,
)
from kubernetes import client as kubernetes
from kubernetes import config
from kubernetes.client import ApiException

SYSTEM = "agent-sandbox-system"
CORE, EXTENSIONS, VERSION = "agents.x-k8s.io", "extensions.agents.x-k8s.io", "v1beta1"
LAUNCH_TYPE = "agents.x-k8s.io/launch-type"
POOL_MEMBER = "agents.x-k8s.io/warm-pool-sandbox"
BLOB = os.urandom(5_000_000)

# How long anything may take on a machine that does other things too; then it says where it hangs.
WAIT_SECONDS_MAX = 120
SCRIPT_SECONDS_MAX = 540
STARTED = time.monotonic()


def done(step):
    print(f"{time.monotonic() - STARTED:6.1f} s  {step}", flush=True)


def until(what, wanted):
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not wanted():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.1)


def fails(kind, call, *args, status=None, **kwargs):
    """What is raised, which must be of this kind."""
    try:
        call(*args, **kwargs)
    except kind as error:
        if status is not None:
            said = error.response.text if error.response is not None else None
            assert error.status_code == status, (error.status_code, said)
        return error
    raise AssertionError(f"no {kind.__name__}")


def custom(group, plural, name, namespace="default"):
    """An object of ours, or None."""
    try:
        api = kubernetes.CustomObjectsApi()
        return api.get_namespaced_custom_object(group, VERSION, namespace, plural, name)
    except ApiException as error:
        assert error.status == 404, error
        return None


def sandboxes(namespace="default", **kwargs):
    api = kubernetes.CustomObjectsApi()
    return api.list_namespaced_custom_object(CORE, VERSION, namespace, "sandboxes", **kwargs)["items"]


def sandbox(box):
    return custom(CORE, "sandboxes", box.sandbox_id, box.namespace)


def pod(box):
    try:
        return kubernetes.CoreV1Api().read_namespaced_pod(box.sandbox_id, box.namespace)
    except ApiException as error:
        assert error.status == 404, error
        return None


def launch_type(box):
    return sandbox(box)["metadata"]["labels"][LAUNCH_TYPE]


def condition(box, kind):
    conditions = sandbox(box)["status"]["conditions"]
    return next((entry["status"] for entry in conditions if entry["type"] == kind), None)


def routers():
    """The router's pods, as somebody in the cluster reaches them."""
    pods = kubernetes.CoreV1Api().list_namespaced_pod(SYSTEM, label_selector="app=sandbox-router")
    running = [pod for pod in pods.items if pod.metadata.deletion_timestamp is None]
    return [f"http://{pod.status.pod_ip}:8080" for pod in running]


def says(box, command, want, **kwargs):
    result = box.commands.run(command, **kwargs)
    assert (result.stdout, result.exit_code) == (want, 0), result


# === what a sandbox does ===


def legacy_commands(box):
    result = box.commands.run("sh -c 'echo out; echo err >&2; exit 3'")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3), result
    assert box.commands.run("no-such-program").exit_code == 1
    slow = box.commands.run("busybox sleep 1000", command_timeout=1)
    assert slow.timed_out and slow.exit_code == 124, slow
    # The caller's own patience ends the request, and that the command.
    fails(SandboxRequestError, box.commands.run, "busybox sleep 1001", timeout=1)
    until("it is killed", lambda: "sleep 1001" not in box.commands.run("busybox ps").stdout)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: says(box, f"sh -c 'echo {i}'", f"{i}\n"), range(32)))


def files(box, root):
    box.files.write("notes/ünï code.txt", "hello")
    assert box.files.read("notes/ünï code.txt") == b"hello"
    box.files.write("blob", BLOB)
    assert box.files.read("blob") == BLOB
    box.files.write("notes/streamed", io.BytesIO(BLOB))
    out = io.BytesIO()
    assert box.files.read_to("notes/streamed", out) == len(BLOB) and out.getvalue() == BLOB
    listed = {entry.name: entry for entry in box.files.list("notes")}
    assert set(listed) == {"streamed", "ünï code.txt"}, listed
    assert listed["streamed"].size == len(BLOB) and listed["streamed"].type == "file"
    assert [entry.type for entry in box.files.list(".") if entry.name == "notes"] == ["directory"]
    assert box.files.exists("blob") and not box.files.exists("none")
    fails(SandboxRequestError, box.files.read, "none", status=404)
    fails(SandboxRequestError, box.files.read, "../etc", allow_unsafe_paths=True, status=403)
    # Commands see what was written.
    says(box, f"busybox wc -c {root}/blob", f"{len(BLOB)} {root}/blob\n")


def sandboxd(box):
    script = "busybox mkdir -p sub; cd sub; echo $COLOUR; pwd; echo err >&2; exit 3"
    result = box.commands.run(script, env={"COLOUR": "blue"})
    assert (result.stdout, result.stderr, result.exit_code) == ("blue\n/workspace/sub\n", "err\n", 3), result
    says(box, "pwd", "/workspace/sub\n", cwd="sub")
    slow = box.commands.run("busybox sleep 1000", command_timeout=1)
    assert slow.timed_out and slow.exit_code == 124, slow
    files(box, "/workspace")
    fails(SandboxRequestError, box.files.delete, "notes", status=409)
    box.files.delete("notes", recursive=True)
    box.files.delete("blob")
    assert [entry.name for entry in box.files.list(".")] == ["sub"]


# === what users do ===


def claim_from_a_pool(client):
    pooled = {item["metadata"]["name"] for item in sandboxes(label_selector=POOL_MEMBER)}
    box = client.create_sandbox(
        "plain",
        labels={"colour": "blue"},
        pod_labels={"sandbox.users.io/team": "blue"},
        pod_annotations={"sandbox.users.io/why": "a test"},
    )
    assert box.sandbox_id in pooled and launch_type(box) == "warm", box.sandbox_id
    until("its pod has left the pool", lambda: POOL_MEMBER not in pod(box).metadata.labels)
    until("its pod is labelled", lambda: "sandbox.users.io/team" in pod(box).metadata.labels)
    metadata = pod(box).metadata
    assert metadata.annotations["sandbox.users.io/why"] == "a test"
    assert box.status() == ("SandboxReady", "Pod is Ready"), box.status()
    assert box.get_pod_name() == box.sandbox_id and box.get_pod_ip() == pod(box).status.pod_ip
    assert box.get_sandbox_name_hash() == metadata.labels["agents.x-k8s.io/sandbox-name-hash"]
    done("a claim is answered from the pool")
    return box


def find_again(box):
    other = SandboxClient()
    again = other.get_sandbox(box.claim_name)
    assert again.sandbox_id == box.sandbox_id
    says(again, "sh -c 'read line </app/notes/greeting; echo $line'", "hello\n")
    assert other.list_active_sandboxes() == [("default", box.claim_name)]
    assert box.claim_name in other.list_all_sandboxes(label_selector="colour=blue")
    assert other.list_all_sandboxes(label_selector="colour=red") == []
    assert other.get_sandbox_claim_warmpool_name(box.claim_name, "default") == "plain"
    fails(SandboxNotFoundError, other.get_sandbox, "no-such-claim", resolve_timeout=1)
    again.close_connection()
    done("another client finds it by its claim")


def claim_by_name(client):
    box = client.create_sandbox("plain", claim_name="mine")
    assert fails(ApiException, client.create_sandbox, "plain", claim_name="mine").status == 409
    other = SandboxClient()
    assert other.create_sandbox("plain", claim_name="mine", adopt_existing=True).sandbox_id == box.sandbox_id
    other.delete_all()
    box.close_connection()
    until("the claim is gone", lambda: custom(EXTENSIONS, "sandboxclaims", "mine") is None)
    done("a claim with a name is made once, and adopted")


def claim_with_variables(client):
    box = client.create_sandbox("plain", env={"COLOUR": "blue"})
    assert launch_type(box) == "cold"
    says(box, "sh -c 'echo $COLOUR'", "blue\n")
    error = fails(SandboxClaimFailedError, client.create_sandbox, "keep", env={"COLOUR": "blue"})
    assert "EnvVarsInjectionRejected" in str(error), error
    done("a claim with variables starts a pod of its own")


def set_mode(box, mode):
    api, body = kubernetes.CustomObjectsApi(), {"spec": {"operatingMode": mode}}
    api.patch_namespaced_custom_object(CORE, VERSION, box.namespace, "sandboxes", box.sandbox_id, body)


def after_moving(box, command, want):
    """The client keeps a pod's address until it is told 502."""
    try:
        says(box, command, want)
    except SandboxRequestError as error:
        assert error.status_code == 502, error
        says(box, command, want)


def suspend_and_resume(client):
    box = client.create_sandbox("keep")
    box.files.write("kept", "on a volume")
    says(box, "sh -c 'echo gone >/tmp/file; busybox cat /tmp/file'", "gone\n")
    uid, address = pod(box).metadata.uid, box.get_pod_ip()

    set_mode(box, "Suspended")
    until("it is suspended", lambda: condition(box, "Suspended") == "True")
    assert pod(box) is None and box.status() == ("SandboxNotReady", "Sandbox is suspended"), box.status()
    bystander = SandboxClient().get_sandbox(box.claim_name)
    fails(SandboxRequestError, bystander.commands.run, "busybox true", status=502)
    done("a suspended sandbox has no pod")

    set_mode(box, "Running")
    client.k8s_helper.wait_for_sandbox_ready(box.sandbox_id, "default", WAIT_SECONDS_MAX)
    assert pod(box).metadata.uid != uid and box.get_pod_ip() != address
    after_moving(box, "busybox cat /app/kept", "on a volume")
    assert box.files.read("kept") == b"on a volume"
    says(bystander, "busybox cat /app/kept", "on a volume")
    bystander.close_connection()
    assert box.commands.run("busybox cat /tmp/file").exit_code == 1
    done("a resumed one has its volume, and the same name")

    again = PodSnapshotSandboxClient().get_sandbox(box.claim_name)
    says(again, "sh -c 'echo twice >/app/kept'", "")
    suspended = again.suspend(snapshot_before_suspend=False)
    assert suspended.success and again.is_suspended() and pod(box) is None, suspended
    resumed = again.resume()
    assert resumed.success and not again.is_suspended(), resumed
    says(again, "busybox cat /app/kept", "twice\n")
    again.close_connection()
    done("the client's own suspend and resume do the same")


def sandboxd_by_tunnel():
    with SandboxClient(SandboxdPodTunnelConnectionConfig()) as client:
        sandboxd(client.create_sandbox("plain"))
        assert len(client.list_active_sandboxes()) == 1
    assert client.list_active_sandboxes() == []
    done("sandboxd's API works through a tunnel to the pod")


def without_a_tunnel(box):
    for url in routers():
        client = SandboxClient(SandboxDirectConnectionConfig(api_url=url))
        says(client.get_sandbox(box.claim_name), "sh -c 'echo direct'", "direct\n")
    for config in [
        SandboxInClusterConnectionConfig(),
        SandboxdInClusterConnectionConfig(mode="in-cluster-pod-ip"),
    ]:
        says(SandboxClient(config).get_sandbox(box.claim_name), "sh -c 'echo inside'", "inside\n")
    done("every router is reached directly, and the pod too")


async def asynchronously():
    config = SandboxDirectConnectionConfig(api_url=routers()[0])
    async with AsyncSandboxClient(connection_config=config) as client:
        box = await client.create_sandbox("plain", namespace="team")
        result = await box.commands.run("sh -c 'echo $((6 * 7))'")
        assert (result.stdout, result.exit_code) == ("42\n", 0), result
        await box.files.write("blob", BLOB)
        assert await box.files.read("blob") == BLOB
        claim = box.claim_name
        assert claim in await client.list_all_sandboxes(namespace="team")
    until("its claim is gone", lambda: custom(EXTENSIONS, "sandboxclaims", claim, "team") is None)
    done("the asynchronous client works, in another namespace")


def under_gvisor(client):
    box = client.create_sandbox("gvisor")
    assert launch_type(box) == "warm" and pod(box).spec.runtime_class_name == "gvisor"
    kernel = box.commands.run("busybox uname -v").stdout.strip()
    assert kernel and kernel != os.uname().version, kernel
    legacy_commands(box)
    files(box, "/app")
    config = SandboxdInClusterConnectionConfig(mode="in-cluster-pod-ip")
    sandboxd(SandboxClient(config).get_sandbox(box.claim_name))
    done(f"all of it under gVisor ({kernel})")


def what_goes_wrong(client):
    fails(SandboxWarmPoolNotFoundError, client.create_sandbox, "no-such-pool")
    fails(SandboxTemplateNotFoundError, client.create_sandbox, "orphan")
    until("what was not made is not left", lambda: set(client.list_all_sandboxes()) == {
        claim for namespace, claim in client.list_active_sandboxes() if namespace == "default"
    })
    done("pools and templates that are missing are named")


def expiry(client):
    box = client.create_sandbox("plain", shutdown_after_seconds=2)
    until("it ends", lambda: custom(EXTENSIONS, "sandboxclaims", box.claim_name) is None)
    until("its pod ends", lambda: pod(box) is None)
    box.close_connection()
    done("a claim ends when its time is over")


def delete_all(client):
    boxes = [client.get_sandbox(name, namespace) for namespace, name in client.list_active_sandboxes()]
    claims = [(box.namespace, box.claim_name) for box in boxes]
    assert len(claims) > 3
    client.delete_all()
    for box, (namespace, claim) in zip(boxes, claims):
        until("its claim is gone", lambda: custom(EXTENSIONS, "sandboxclaims", claim, namespace) is None)
        until("it is gone", lambda: sandbox(box) is None)
        until("its pod is gone", lambda: pod(box) is None)
    volumes = kubernetes.CoreV1Api().list_namespaced_persistent_volume_claim
    until("its volume is gone", lambda: len(volumes("default").items) == 1)
    done("deleting a claim deletes sandbox, pod and volume")


def is_full(pool):
    return pool["status"].get("readyReplicas") == pool["status"]["replicas"] == pool["spec"]["replicas"]


def pools_are_full():
    for name, namespace in [("plain", "default"), ("keep", "default"), ("gvisor", "default"), ("plain", "team")]:
        def pool():
            return custom(EXTENSIONS, "sandboxwarmpools", name, namespace)

        until(f"{namespace}/{name} is full", lambda: is_full(pool()))
    assert len(sandboxes()) == 4 and len(sandboxes("team")) == 1
    done("the pools are full again, and nothing else is left")


def everything():
    client = SandboxClient()
    box = claim_from_a_pool(client)
    legacy_commands(box)
    done("commands: output, exit codes, time limits, eight at once")
    files(box, "/app")
    fails(NotImplementedError, box.files.delete, "blob")
    done("files: five megabytes of bytes, directories, names in any script")
    box.files.write("notes/greeting", "hello\n")
    find_again(box)
    claim_by_name(client)
    elsewhere = client.create_sandbox("plain", namespace="team")
    says(elsewhere, "sh -c 'echo there'", "there\n")
    done("another namespace has its own pool")
    claim_with_variables(client)
    suspend_and_resume(client)
    sandboxd_by_tunnel()
    without_a_tunnel(box)
    asyncio.run(asynchronously())
    under_gvisor(client)
    what_goes_wrong(client)
    expiry(client)
    delete_all(client)
    pools_are_full()


# === a router that asks for tokens ===


# What a client needs that makes sandboxes and uses them. To suspend them, also `patch` and `watch`.
CLAIMS = {
    "apiGroups": [EXTENSIONS],
    "resources": ["sandboxclaims"],
    "verbs": ["create", "get", "list", "watch", "delete"],
}
LOOK = {"apiGroups": [CORE], "resources": ["sandboxes"], "verbs": ["get"]}
REACH = {"apiGroups": [CORE], "resources": ["sandboxes/proxy"], "verbs": ["create"]}


def account(name, *rules):
    """The token of a service account that may do this and nothing else."""
    core, rbac = kubernetes.CoreV1Api(), kubernetes.RbacAuthorizationV1Api()
    core.create_namespaced_service_account("default", {"metadata": {"name": name}})
    rbac.create_namespaced_role("default", {"metadata": {"name": name}, "rules": list(rules)})
    subject = {"kind": "ServiceAccount", "name": name, "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    binding = {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}
    rbac.create_namespaced_role_binding("default", binding)
    # The router keeps a no for a while, so it is not asked before the cluster has heard of it.
    until("the cluster has heard of it", lambda: may_reach(name, rules[-1].get("resourceNames", ["any"])[0]))
    spec = {"spec": {"audiences": [], "expirationSeconds": 3600}}
    return core.create_namespaced_service_account_token(name, "default", spec).status.token


def may_reach(name, box):
    wanted = {"namespace": "default", "group": CORE, "resource": "sandboxes", "subresource": "proxy", "verb": "create", "name": box}
    review = {"spec": {"user": f"system:serviceaccount:default:{name}", "resourceAttributes": wanted}}
    return kubernetes.AuthorizationV1Api().create_subject_access_review(review).status.allowed


def with_token(token):
    header = {"Authorization": f"Bearer {token}"}
    return SandboxDirectConnectionConfig(api_url=routers()[0], extra_headers=header)


def a_token_for_one_sandbox():
    with SandboxClient() as client:
        mine, other = client.create_sandbox("plain"), client.create_sandbox("plain")
        fails(SandboxRequestError, mine.commands.run, "busybox true", status=401)
        token = account("agent", REACH | {"resourceNames": [mine.sandbox_id]})
        agent = SandboxClient(with_token(token))
        says(agent.get_sandbox(mine.claim_name), "sh -c 'echo allowed'", "allowed\n")
        denied = agent.get_sandbox(other.claim_name)
        fails(SandboxRequestError, denied.commands.run, "busybox true", status=403)
    done("with its token a client reaches its sandbox, and no other")


def a_token_for_everything():
    token = account("developer", CLAIMS, LOOK, REACH)
    with open(os.environ["KUBECONFIG"]) as file:
        settings = yaml.safe_load(file)
    settings["users"][0]["user"] = {"token": token}
    developer = config.new_client_from_config_dict(settings)
    with SandboxClient(with_token(token), api_client=developer) as client:
        box = client.create_sandbox("plain")
        says(box, "sh -c 'echo hello'", "hello\n")
        box.files.write("blob", BLOB)
        assert box.files.read("blob") == BLOB
        claim = box.claim_name
        assert claim in client.list_all_sandboxes()
        assert fails(ApiException, client.create_sandbox, "plain", namespace="team").status == 403
    until("its claim is gone", lambda: claim not in client.list_all_sandboxes())
    done("three rights in one namespace are all that a client needs")


def tokens():
    a_token_for_one_sandbox()
    a_token_for_everything()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SCRIPT_SECONDS_MAX, exit=True)
    {"everything": everything, "tokens": tokens}[sys.argv[1]]()
