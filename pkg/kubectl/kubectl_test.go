package kubectl

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// fakeKubectl is a kubectl of a cluster with two nodes that have csi-node, of which b
// does not answer if the file "silent" is there, nor lists PersistentVolumes if "forbidden"
// is. It notes how it was called. Another driver's plugin is plugin-c, on node a.
const fakeKubectl = `#!/bin/sh
echo "$*" >> "$FAKE/calls"
case "$*" in
*"get pods --all-namespaces"*)
	cat "$FAKE/plugins" ;;
*"get pod writer"*)
	echo '{"metadata":{"name":"writer","namespace":"default","uid":"u1"},"spec":{"nodeName":"a","volumes":[{"name":"d","persistentVolumeClaim":{"claimName":"data"}},{"name":"s","csi":{"driver":"x"}},{"name":"e","ephemeral":{}},{"name":"c","configMap":{}}]}}' ;;
*"get pod "*)
	echo 'Error from server (NotFound): pods "x" not found' >&2; exit 1 ;;
*"get persistentvolumeclaim data "*)
	echo '{"spec":{"volumeName":"pv-1"}}' ;;
*"get persistentvolumeclaim writer-e "* | *"get persistentvolumeclaim waiting "*)
	echo '{"spec":{}}' ;;
*"get persistentvolumeclaim refused "*)
	echo '{"metadata":{"uid":"u9"},"spec":{}}' ;;
*"get persistentvolumeclaim large "*)
	echo '{"spec":{"storageClassName":"fast","resources":{"requests":{"storage":"50Gi"}}}}' ;;
*"get persistentvolumeclaim fitting "*)
	echo '{"spec":{"storageClassName":"fast","resources":{"requests":{"storage":"2Gi"}}}}' ;;
*"get persistentvolumeclaim misnamed "*)
	echo '{"spec":{"storageClassName":"typo","resources":{"requests":{"storage":"2Gi"}}}}' ;;
*"get storageclass fast "*)
	echo '{"provisioner":"x","volumeBindingMode":"Immediate"}' ;;
*"get storageclass typo "*)
	echo '{"provisioner":"X"}' ;;
*"get csinodes "*)
	if [ -e "$FAKE/forbidden" ]; then echo "Error from server (Forbidden): csinodes is forbidden" >&2; exit 1; fi
	echo '{"items":[{"spec":{"drivers":null}},{"spec":{"drivers":[{"name":"y"},{"name":"x"}]}}]}' ;;
*"get csistoragecapacities --all-namespaces --selector=csi.storage.k8s.io/drivername=x "*)
	echo '{"items":[{"storageClassName":"fast","capacity":"1Gi","nodeTopology":{"matchLabels":{"topology.x/node":"a"}}},{"storageClassName":"slow","capacity":"99Gi","nodeTopology":{"matchLabels":{"topology.x/node":"a"}}},{"storageClassName":"fast","capacity":"9Gi","maximumVolumeSize":"2Gi","nodeTopology":{"matchLabels":{"topology.x/node":"b"}}},{"storageClassName":"fast"}]}' ;;
*"get csistoragecapacities --all-namespaces --selector=csi.storage.k8s.io/drivername=X "*)
	echo '{"items":[]}' ;;
*"get persistentvolumeclaim "*)
	if [ -e "$FAKE/forbidden" ]; then echo "Error from server (Forbidden): persistentvolumeclaims is forbidden" >&2; exit 1; fi
	echo 'Error from server (NotFound): persistentvolumeclaims "x" not found' >&2; exit 1 ;;
*"get persistentvolumes "*)
	if [ -e "$FAKE/forbidden" ]; then echo "Error from server (Forbidden): persistentvolumes is forbidden" >&2; exit 1; fi
	echo '{"items":[{"metadata":{"name":"pv-1"},"status":{"phase":"Bound"},"spec":{"csi":{"driver":"x","volumeHandle":"vol-1"},"claimRef":{"namespace":"default","name":"data"},"storageClassName":"fast","nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"topology.x/node","operator":"In","values":["a"]}]}]}}}},{"spec":{"csi":{"driver":"y","volumeHandle":"vol-2"},"claimRef":{"namespace":"other","name":"driver"}}},{"metadata":{"name":"pv-2"},"status":{"phase":"Released"},"spec":{"csi":{"driver":"x","volumeHandle":"vol-2"}}},{"spec":{}}]}' ;;
*"get csistoragecapacities --all-namespaces --selector=csi.storage.k8s.io/drivername "*)
	if [ -e "$FAKE/forbidden" ]; then echo "Error from server (Forbidden): csistoragecapacities is forbidden" >&2; exit 1; fi
	cat "$FAKE/room" ;;
*"get persistentvolume pv-1 "*)
	echo '{"spec":{"csi":{"driver":"x","volumeHandle":"vol-1"}}}' ;;
*"exec --namespace=csi-node plugin-b "*)
	if [ -e "$FAKE/silent" ]; then echo "error dialing backend" >&2; exit 1; fi
	case "$*" in
	*status*) echo '{"running":true,"driver":"x","volumes":[{"volume":"vol-2","device":"x","parts":[{"part":"stage","asked":"staged at /x","is":"failing","error":"boom"}]}],"storage":[{"backend":"pool","values":[{"name":"size_bytes","value":4096},{"name":"free_bytes","value":1024}]}],"storageProblems":[{"reason":"PoolFull","message":"the pool /p is nearly full"}]}' ;;
	*"orphans --output=json") echo '[{"volume":"vol-3"}]' ;;
	*"volume list --output=json --timeout=24s") echo '{"entries":[{"volume":{"volumeId":"vol-1","capacityBytes":"1024","accessibleTopology":[{"segments":{"topology.x/node":"b"}}]}},{"volume":{"volumeId":"vol-2"}},{"volume":{"volumeId":"vol-3","capacityBytes":"1024"}}]}' ;;
	*) echo "b says: $*" ;;
	esac ;;
*"exec --namespace=csi-node plugin-a "*)
	case "$*" in
	*status*) echo '{"running":true,"driver":"x","nodeID":"id-of-a","volumes":[{"volume":"vol-1","device":"x","parts":[{"part":"target /y","pod":"default/writer","asked":"published","is":"settled"}]}],"refusals":[{"volume":"pvc-u9","call":"CreateVolume","code":"InvalidArgument","error":"bad"}],"storage":[{"backend":"pool","values":[{"name":"size_bytes","value":4096},{"name":"free_bytes","value":3072}]}]}' ;;
	*"explain --output=json"*) echo "{\"volume\":\"$*\"}" ;;
	*"orphans --output=json") echo '[]' ;;
	*"volume list --output=json --timeout=24s") echo '{"entries":[{"volume":{"volumeId":"vol-1","capacityBytes":"1048576","accessibleTopology":[{"segments":{"topology.x/node":"a"}}]}},{"volume":{"volumeId":"'$INLINE'","capacityBytes":"2048"}}]}' ;;
	*) echo "a says: $*" ;;
	esac ;;
*"exec --namespace=csi-node plugin-c "*)
	if [ -e "$FAKE/ended" ]; then echo 'error: unable to upgrade connection: container not found ("csi-node")' >&2; exit 1; fi
	case "$*" in
	*status*) if [ -e "$FAKE/away" ]; then echo '{"running":true,"storage":[{"backend":"pool"}],"storageProblems":[{"reason":"PoolUnusable","message":"the pool is away"}]}'; exit; fi
		echo '{"running":true,"driver":"y","volumes":[],"refusals":[{"volume":"vol-2","call":"NodeStageVolume","code":"InvalidArgument","error":"bad"}]}' ;;
	*explain*) echo "there is no such volume" >&2; exit 1 ;;
	*) echo "c says: $*" ;;
	esac ;;
*)
	echo "what is $*?" >&2; exit 1 ;;
esac
`

const pods = `{"items":[
{"metadata":{"name":"plugin-b","namespace":"csi-node"},"spec":{"nodeName":"b","containers":[{"name":"csi-node"}]},"status":{"phase":"Running"}},
{"metadata":{"name":"plugin-a","namespace":"csi-node"},"spec":{"nodeName":"a","containers":[{"name":"registrar"},{"name":"csi-node"}]},"status":{"phase":"Running"}},
{"metadata":{"name":"old","namespace":"csi-node","deletionTimestamp":"x"},"spec":{"nodeName":"a","containers":[{"name":"csi-node"}]},"status":{"phase":"Running"}},
{"metadata":{"name":"unplaced","namespace":"csi-node"},"spec":{"containers":[{"name":"csi-node"}]},"status":{"phase":"Pending"}},
{"metadata":{"name":"evicted","namespace":"csi-node"},"spec":{"nodeName":"c","containers":[{"name":"csi-node"}]},"status":{"phase":"Failed"}},
{"metadata":{"name":"other","namespace":"x"},"spec":{"nodeName":"d","containers":[{"name":"y"}]},"status":{"phase":"Running"}}]}`

// fake puts a kubectl into the PATH that knows that cluster, and returns its directory.
func fake(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	machine.WriteProgram(t, filepath.Join(dir, "kubectl"), fakeKubectl)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(pods), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "room"), []byte(`{"items":[]}`), 0o600))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("FAKE", dir)
	t.Setenv("INLINE", inlineHandle("u1", "s"))
	return dir
}

func run(t *testing.T, args ...string) (out, errs string, err error) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := Command("v1")
	cmd.SetArgs(args)
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	err = cmd.ExecuteContext(t.Context())
	return stdout.String(), stderr.String(), err
}

// Room that is told of is stale only on a node without a pod of the plugin, and only where it is
// that of one node, and of a driver that was asked.
func TestStaleRoom(t *testing.T) {
	dir := fake(t)
	names := 0
	room := func(driver, key, node string) string {
		names++
		return fmt.Sprintf(`{"metadata":{"name":"o%d","namespace":"csi-node","labels":{"csi.storage.k8s.io/drivername":"%s"}},"nodeTopology":{"matchLabels":{%s:"%s"}}}`, names, driver, key, node)
	}
	own := `"topology.x/node"`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "room"), []byte(`{"items":[`+strings.Join([]string{room("x", own, "gone"), room("x", own, "gone"), room("x", `"x/node"`, "gone"),
		room("x", own, "a"), room("x", own, "c") /* evicted */, room("other", own, "far"), room("x", `"topology.x/zone"`, "south"), room("x", `"topology.y/node"`, "of-y"),
		room("x", own, "node-0123456789abcdef0123456789abcdef"), room("x", own, "id-of-a"), room("x", `"topology.x/rack":"1",`+own, "racked"), `{"metadata":{"labels":{}}}`}, ",")+`]}`), 0o600))
	for _, output := range []string{"table", "wide"} {
		out, _, err := run(t, "status", "-o", output)
		if words := strings.Join(strings.Fields(out), " "); err != nil || strings.Count(words, "On node ") != 1 || !strings.Contains(words, "On node gone the plugin of x does not run, ") ||
			!strings.Contains(words, "`kubectl --namespace=csi-node delete csistoragecapacities o1 o2 o3`") {
			t.Errorf("prints (%v)\n%s", err, out)
		}
	}
	if out, _, err := run(t, "status", "-o", "json"); err != nil || !strings.Contains(out, `"node": "gone"`) {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	none := func(file string, args ...string) {
		t.Helper()
		if file != "" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, file), nil, 0o600))
		}
		if out, _, _ := run(t, append([]string{"status"}, args...)...); strings.Contains(out, "On node ") {
			t.Errorf("%s %v: prints\n%s", file, args, out)
		}
	}
	none("", "--node", "a")
	none("", "--selector", "app=x")
	none("silent")
	require.NoError(t, os.Remove(filepath.Join(dir, "silent")))
	none("forbidden")
}

func TestStatus(t *testing.T) {
	dir := fake(t)
	out, _, err := run(t, "status", "--context", "c1")
	lines := strings.Split(out, "\n")
	if err != nil || !strings.HasPrefix(lines[0], "NODE  VOLUME") || !strings.HasPrefix(lines[1], "a     default/data  default/writer") || !strings.HasPrefix(lines[2], "b     vol-2         stage") || strings.TrimSpace(lines[3]) != "boom" || lines[len(lines)-2] != "Node b: storage: PoolFull: the pool /p is nearly full" {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	require.NoError(t, err)
	for call := range strings.Lines(string(calls)) {
		if !strings.HasPrefix(call, "--context=c1 ") || strings.Contains(call, "get pods ") && !strings.Contains(call, " --selector=app.kubernetes.io/part-of=csi-node ") {
			t.Errorf("called was kubectl %s", call)
		}
	}
	_, _, err = run(t, "status", "--as", "me", "--as-group", "g1", "--as-group", "g2")
	require.NoError(t, err)
	calls, err = os.ReadFile(filepath.Join(dir, "calls"))
	require.NoError(t, err)
	if !strings.Contains(string(calls), "\n--as=me --as-group=g1 --as-group=g2 get pods ") {
		t.Errorf("called was\n%s", calls)
	}
	if out, _, err := run(t, "status", "--pod", "writer", "-o", "yaml"); err != nil || !strings.Contains(out, "volume: vol-1") || strings.Contains(out, "vol-2") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "status", "-o", "json"); err != nil || strings.Count(out, `"reason": "PoolFull"`) != 1 {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "status", "--node", "b", "-o", "wide"); err != nil || strings.Contains(out, "vol-1") || !strings.Contains(out, "Node b (pod csi-node/plugin-b):\nStorage: PoolFull: the pool /p is nearly full\n") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	for _, flags := range [][]string{{"--claim", "data"}, {"--claim", "default/data"}, {"--class", "fast"}} {
		if out, _, err := run(t, append(flags, "status", "-o", "wide")...); err != nil || !strings.Contains(out, "vol-1 (default/data)") || strings.Contains(out, "vol-2") {
			t.Errorf("%q: prints (%v)\n%s", flags, err, out)
		}
	}
	for _, flags := range [][]string{{"-n", "default"}, {"-n", "default", "--pod", "writer"}, {"-n", "default", "--claim", "data"}, {"-n", "other", "--pod", "default/writer"}} {
		if out, _, err := run(t, append(flags, "status", "-o", "wide")...); err != nil || !strings.Contains(out, "vol-1 (default/data)") || strings.Contains(out, "vol-2") {
			t.Errorf("%q: prints (%v)\n%s", flags, err, out)
		}
	}
	for _, flags := range [][]string{{"-n", "defaul"}, {"-n", "other", "--pod", "writer"}, {"-n", "other", "--claim", "data"}} {
		if out, _, err := run(t, append(flags, "status")...); err != nil || !strings.HasPrefix(out, "No volume matches; the nodes that answered have 2 in all.\n") {
			t.Errorf("%q: prints (%v)\n%s", flags, err, out)
		}
	}
	if out, _, err := run(t, "status", "--class", "slow"); err != nil || !strings.HasPrefix(out, "No volume") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	if _, _, err := run(t, "status", "--node", "z"); err == nil || !strings.Contains(err.Error(), "no pod of csi-node runs on node z") {
		t.Errorf("of a node without csi-node: %v", err)
	}
	// Who may not list PersistentVolumes sees volumes by their ids.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "forbidden"), nil, 0o600))
	if out, _, err := run(t, "status"); err != nil || !strings.Contains(out, "vol-1") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	if _, _, err := run(t, "status", "--claim", "data"); err == nil || !strings.Contains(err.Error(), "Forbidden") {
		t.Errorf("a claim that cannot be looked for: %v", err)
	}
	// What answers is shown, and what does not is an error.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "silent"), nil, 0o600))
	out, _, err = run(t, "status")
	if err == nil || command.ExitCode(err) != 1 || !strings.Contains(err.Error(), "node b: kubectl exec: error dialing backend") || !strings.Contains(out, "vol-1") || !strings.Contains(out, "Node b could not be asked") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
}

// What cannot be explained is an error that says which volume it is, and nothing is printed of it.
func TestExplainFails(t *testing.T) {
	dir := fake(t)
	machine.WriteProgram(t, filepath.Join(dir, "kubectl"), strings.Replace(fakeKubectl, `case "$*" in`, `case "$*" in
*"explain vol-2") echo "it hangs" >&2; exit 1 ;;`, 1))
	if out, _, err := run(t, "explain", "vol-2"); out != "" || err == nil || err.Error() != "node b: volume vol-2: kubectl exec: it hangs" {
		t.Errorf("prints %q (%v)", out, err)
	}
}

// A claim whose call was refused is named and found like the others: of its volume there is nothing else to see.
func TestRefusedClaim(t *testing.T) {
	dir := fake(t)
	const stage = "exec --namespace=csi-node plugin-b "
	refusing := strings.Replace(fakeKubectl, `*"`+stage+`"*)`, `*"`+stage+`"*status*)
	echo '{"running":true,"driver":"x","volumes":[],"refusals":[{"volume":"vol-1","call":"NodeStageVolume","code":"InvalidArgument","error":"bad flag","times":1},{"volume":"vol-3","call":"NodeStageVolume","code":"InvalidArgument","error":"worse","times":1}]}' ;;
*"`+stage+`"*)`, 1)
	machine.WriteProgram(t, filepath.Join(dir, "kubectl"), refusing)
	for _, flags := range [][]string{{"--claim", "default/data"}, {"--class", "fast"}, {"--claim", "data", "-o", "wide"}} {
		out, _, err := run(t, append(flags, "status", "--node", "b")...)
		if err != nil || !strings.Contains(out, "volume vol-1 (default/data): NodeStageVolume was refused") || strings.Contains(out, "worse") {
			t.Errorf("%q: prints (%v)\n%s", flags, err, out)
		}
	}
	if out, _, err := run(t, "status", "--node", "b", "--class", "slow"); err != nil || strings.Contains(out, "refused") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	shown, err := pageOf(t, "--node", "b").Read(t.Context())
	if err != nil || shown.Nodes[0].Refusals[0].Claim != "default/data" || shown.Nodes[0].Refusals[1].Claim != "" {
		t.Errorf("the page shows %+v (%v)", shown, err)
	}
}

func TestTop(t *testing.T) {
	dir := fake(t)
	const want = "NODE  STORAGE  USED  ROOM\nb     pool     75%   1Ki of 4Ki free\na     pool     25%   3Ki of 4Ki free\n"
	if out, _, err := run(t, "top"); err != nil || out != want {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "away"), nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(strings.NewReplacer("evicted", "plugin-c", "Failed", "Running").Replace(pods)), 0o600))
	if out, _, err := run(t, "top"); err != nil || !strings.HasSuffix(out, "\nc     -        -     PoolUnusable, as `kubectl csi-node status` tells\n") {
		t.Errorf("with a node whose pool is away prints (%v)\n%s", err, out)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "silent"), nil, 0o600))
	if out, _, err := run(t, "top", "-o", "json"); err == nil || !strings.Contains(out, `"node": "a"`) || strings.Contains(out, `"node": "b"`) {
		t.Errorf("prints (%v)\n%s", err, out)
	}
}

func TestExplain(t *testing.T) {
	dir := fake(t)
	out, errs, err := run(t, "explain", "writer")
	if err != nil || !strings.Contains(out, "On node a: a says: exec --namespace=csi-node plugin-a --container=csi-node -- csi-node explain vol-1\n") || !strings.Contains(out, "vol-1\n\nOn node a: ") || !strings.Contains(out, "explain "+inlineHandle("u1", "s")+"\n") || strings.Contains(out, "b says") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	if !strings.Contains(errs, "Claim default/writer-e has no volume yet") {
		t.Errorf("notes %s", errs)
	}
	if out, _, err := run(t, "explain", "vol-2"); err != nil || out != "On node b: b says: exec --namespace=csi-node plugin-b --container=csi-node -- csi-node explain vol-2\n" {
		t.Errorf("of a volume prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "explain", "default/data"); err != nil || !strings.HasSuffix(out, "-- csi-node explain vol-1\n") {
		t.Errorf("of a claim prints (%v)\n%s", err, out)
	}
	if out, errs, err := run(t, "explain", "writer", "-o", "json"); err != nil || !strings.HasPrefix(out, "[\n  {\n    \"node\": \"a\",\n    \"pod\": \"csi-node/plugin-a\",\n    \"volume\": ") || strings.Count(out, "-- vol-1") != 1 || strings.Count(out, `"node"`) != 2 || !strings.Contains(errs, "writer-e") {
		t.Errorf("as JSON prints (%v)\n%s%s", err, out, errs)
	}
	if out, _, err := run(t, "explain", "vol-9", "-o", "yaml"); err == nil || out != "" {
		t.Errorf("of a stranger as YAML prints (%v)\n%s", err, out)
	}
	if _, errs, err := run(t, "explain", "waiting"); err == nil || !strings.Contains(errs, "Claim waiting has no volume yet") {
		t.Errorf("of a claim without a volume: %v\n%s", err, errs)
	}
	for claim, why := range map[string]string{
		"large":    "it asks for 50Gi, and the most that any node has room for in its class fast is 2Gi, on b.\n",
		"misnamed": "its class typo names the provisioner X, and no node has a CSI driver of that name (`kubectl get csinodes -o yaml`).\n",
		"fitting":  "`kubectl describe pvc` tells why.\n",
	} {
		if _, errs, err := run(t, "explain", claim); err == nil || errs != "Claim "+claim+" has no volume yet: "+why {
			t.Errorf("of a claim that no event tells of: %v\n%s", err, errs)
		}
	}
	if out, errs, err := run(t, "explain", "refused"); err != nil || !strings.Contains(errs, "Claim refused has no volume yet") || !strings.HasSuffix(out, "On node a: a says: exec --namespace=csi-node plugin-a --container=csi-node -- csi-node explain pvc-u9\n") {
		t.Errorf("of a claim whose volume was refused prints (%v)\n%s%s", err, out, errs)
	}
	if _, _, err := run(t, "explain", "vol-9"); err == nil || !strings.Contains(err.Error(), "knows of it on no node") {
		t.Errorf("of a stranger: %v", err)
	}
	if _, _, err := run(t, "explain", "default/stranger"); err == nil || !strings.Contains(err.Error(), "NotFound") {
		t.Errorf("of a pod that is not there: %v", err)
	}
	// A pod's volumes are on its node: one that is down elsewhere is not waited for.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "silent"), nil, 0o600))
	if out, _, err := run(t, "explain", "writer"); err != nil || !strings.HasPrefix(out, "On node a: ") {
		t.Errorf("while another node is down prints (%v)\n%s", err, out)
	}
	if _, _, err := run(t, "explain", "vol-1"); err == nil || !strings.Contains(err.Error(), "node b: ") {
		t.Errorf("of a volume that may be on a node that is down: %v", err)
	}
	require.NoError(t, os.Remove(filepath.Join(dir, "silent")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "forbidden"), nil, 0o600))
	if _, errs, _ := run(t, "explain", "large"); !strings.Contains(errs, "describe pvc") {
		t.Errorf("of a claim, to who may not read what tells of room:\n%s", errs)
	}
	if out, _, err := run(t, "explain", "vol-2"); err != nil || !strings.HasPrefix(out, "On node b: ") {
		t.Errorf("of a volume, to who may not read claims, prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "retry", "vol-2"); err != nil || !strings.Contains(out, "-- csi-node volume retry vol-2 --timeout=24s") {
		t.Errorf("retry prints (%v)\n%s", err, out)
	}
}

func TestOrphansAndReport(t *testing.T) {
	dir := fake(t)
	if out, _, err := run(t, "orphans"); err != nil || !strings.HasPrefix(out, "Node a:\na says") || !strings.Contains(out, "Node b:\nb says") {
		t.Errorf("orphans prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "orphans", "-o", "yaml"); err != nil || out != "- node: a\n  pod: csi-node/plugin-a\n  orphans: []\n- node: b\n  pod: csi-node/plugin-b\n  orphans:\n    - volume: vol-3\n" {
		t.Errorf("orphans as YAML prints (%v)\n%s", err, out)
	}
	out, _, err := run(t, "report", "--directory", dir)
	if err != nil || strings.Count(out, "is written") != 2 {
		t.Errorf("report prints (%v)\n%s", err, out)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "csi-node-report-a.tar.gz")); err != nil || !strings.Contains(string(text), "-- csi-node report --file=- --timeout=24s") {
		t.Errorf("written is %s (%v)", text, err)
	}
	if _, _, err := run(t, "report", "--directory", dir, "--node", "a"); err == nil || !strings.Contains(err.Error(), "node a:") {
		t.Errorf("over a file that is there: %v", err)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "silent"), nil, 0o600))
	if out, _, err := run(t, "orphans", "-o", "json"); err == nil || !strings.Contains(out, `"node": "a"`) || strings.Contains(out, `"node": "b"`) {
		t.Errorf("orphans while a node is silent prints (%v)\n%s", err, out)
	}
	require.NoError(t, os.Remove(filepath.Join(dir, "csi-node-report-b.tar.gz")))
	if _, _, err := run(t, "report", "--directory", dir, "--node", "b"); err == nil {
		t.Error("a node that does not answer is reported")
	}
	if _, err := os.Stat(filepath.Join(dir, "csi-node-report-b.tar.gz")); !os.IsNotExist(err) {
		t.Errorf("a half report is left (%v)", err)
	}
}

// Each volume that a node keeps is beside its PersistentVolume, or said to have none: that of
// another node, which has a volume of the same id, is not its own.
func TestVolumes(t *testing.T) {
	dir := fake(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(strings.ReplaceAll(pods, `"namespace":"csi-node"`, `"namespace":"csi-node","labels":{"csi-node.local/driver":"x"}`)), 0o600))
	inline := inlineHandle("u1", "s")
	space := strings.Repeat(" ", len(inline)-len("vol-1"))
	want := "NODE  VOLUME" + space[1:] + "  SIZE  CLAIM         PV IS\n" +
		"a     vol-1" + space + "  1Mi   default/data  Bound\n" +
		"a     " + inline + "  2Ki   -             none: inline\n" +
		"b     vol-1" + space + "  1Ki   -             missing\n" +
		"b     vol-2" + space + "  0     -             Released\n" +
		"b     vol-3" + space + "  1Ki   -             missing\n"
	if out, _, err := run(t, "volumes"); err != nil || out != want {
		t.Errorf("prints (%v)\n%s\nnot\n%s", err, out, want)
	}
	const json = "[\n  {\n    \"node\": \"b\",\n    \"pod\": \"csi-node/plugin-b\",\n    \"volume\": \"vol-1\",\n    \"size\": 1024\n  },\n  {\n    \"node\": \"b\",\n    \"pod\": \"csi-node/plugin-b\",\n    \"volume\": \"vol-3\",\n    \"size\": 1024\n  }\n]\n"
	if out, _, err := run(t, "volumes", "--without-pv", "-o", "json"); err != nil || out != json {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "volumes", "--without-pv", "--node", "a"); err != nil || out != "There are no such volumes.\n" {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	// A node that does not answer is an error beside what is known.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "silent"), nil, 0o600))
	if out, _, err := run(t, "volumes"); err == nil || !strings.Contains(err.Error(), "node b: ") || !strings.Contains(out, "vol-1") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
	// Who may not list PersistentVolumes is not told that there are none.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "forbidden"), nil, 0o600))
	if out, _, err := run(t, "volumes"); err == nil || !strings.Contains(err.Error(), "Forbidden") || out != "" {
		t.Errorf("prints (%v)\n%s", err, out)
	}
}

// The shell is offered the commands, and the claims and nodes of the plugins' drivers; and no files where none is meant.
func TestCompletion(t *testing.T) {
	dir := fake(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(strings.Replace(pods, `"plugin-a",`, `"plugin-a","labels":{"csi-node.local/driver":"x"},`, 1)), 0o600))
	for args, want := range map[string]string{
		"st":                           "status\tShow the volumes of all nodes in one table\n:4\n",
		"explain ":                     "default/data\n:4\n",
		"retry -n default ":            "default/data\n:4\n",
		"retry -n other ":              ":4\n",
		"explain default/data ":        ":4\n",
		"explain default/data --node ": "a\nb\n:4\n",
		"status --claim ":              "default/data\n:4\n",
		"status --class ":              ":4\n",
		"orphans ":                     ":4\n",
		"top --kubeconfig ":            ":0\n",
		"report --directory ":          ":16\n",
		"top --output ":                "table\njson\nyaml\n:4\n",
	} {
		out, _, err := run(t, append([]string{"__complete"}, strings.Split(args, " ")...)...)
		if err != nil || out != want {
			t.Errorf("%q: offers (%v)\n%s", args, err, out)
		}
	}
	if _, _, err := run(t, "__complete", "explain", "--context", "c1", ""); err != nil {
		t.Error(err)
	}
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	require.NoError(t, err)
	if !strings.Contains(string(calls), "\n--context=c1 get persistentvolumes ") {
		t.Errorf("called was\n%s", calls)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "forbidden"), nil, 0o600))
	if out, _, err := run(t, "__complete", "explain", ""); err != nil || out != ":4\n" {
		t.Errorf("where nothing can be read it offers (%v)\n%s", err, out)
	}
}

// The selector finds the plugins of all drivers, of which a node may have several.
func TestTwoDriversOnANode(t *testing.T) {
	dir := fake(t)
	const second = `{"metadata":{"name":"plugin-c","namespace":"csi-node"},"spec":{"nodeName":"a","containers":[{"name":"csi-node"}]},"status":{"phase":"Running"}},`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(strings.Replace(pods, "[", "["+second, 1)), 0o600))
	if out, _, err := run(t, "explain", "writer"); err != nil || strings.Count(out, "On node a: ") != 2 {
		t.Errorf("explain prints (%v)\n%s", err, out)
	}
	// A call that was refused is found by the claim of its volume, of which nothing else is asked.
	if out, _, err := run(t, "status", "--claim", "other/driver"); err != nil || !strings.HasPrefix(out, "No volume matches; the nodes that answered have ") || !strings.Contains(out, "node a: volume vol-2 (other/driver): NodeStageVolume was refused") {
		t.Errorf("status prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "orphans"); err != nil || !strings.Contains(out, "Node a/plugin-a:\na says") || !strings.Contains(out, "Node a/plugin-c:\nc says") || !strings.Contains(out, "Node b:\n") {
		t.Errorf("orphans prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "top"); err != nil || !strings.Contains(out, "\na/plugin-a  pool ") || !strings.Contains(out, "\nb           pool ") {
		t.Errorf("top prints (%v)\n%s", err, out)
	}
	if out, _, err := run(t, "report", "--directory", dir); err != nil || strings.Count(out, "is written") != 3 || !strings.Contains(out, "csi-node-report-a_plugin-c.tar.gz") {
		t.Errorf("report prints (%v)\n%s", err, out)
	}
}

// A node is not left out because the plugin does not run there, and the error says where to look.
func TestPluginThatDoesNotRun(t *testing.T) {
	dir := fake(t)
	const waiting = `{"metadata":{"name":"waiting","namespace":"csi-node"},"spec":{"nodeName":"c","containers":[{"name":"csi-node"}]},"status":{"phase":"Pending"}},`
	const ended = `{"metadata":{"name":"plugin-c","namespace":"csi-node"},"spec":{"nodeName":"d","containers":[{"name":"csi-node"}]},"status":{"phase":"Running"}},`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(strings.Replace(pods, "[", "["+waiting+ended, 1)), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ended"), nil, 0o600))
	const describe, logs = "node c: the pod has not started: `kubectl --namespace=csi-node describe pod waiting` tells why", "`kubectl --namespace=csi-node logs plugin-c --container=csi-node` tells why"
	for _, name := range []string{"status", "top", "orphans"} {
		out, _, err := run(t, name)
		if err == nil || command.ExitCode(err) != 1 || !strings.Contains(err.Error(), describe) || !strings.Contains(err.Error(), logs) {
			t.Errorf("%s prints (%v)\n%s", name, err, out)
		}
	}
	if out, _, err := run(t, "status"); !strings.Contains(out, "default/data") || !strings.Contains(out, "Node c could not be asked: the pod has not started") {
		t.Errorf("prints (%v)\n%s", err, out)
	}
}

// A pod that is being deleted counts as long as no other one is there, as on a node that is down.
func TestPluginThatEnds(t *testing.T) {
	dir := fake(t)
	ending := strings.Replace(pods, `"plugin-b","namespace":"csi-node"`, `"plugin-b","namespace":"csi-node","deletionTimestamp":"x"`, 1)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(ending), 0o600))
	const describe = "node b: the pod is being ended, and no other one is there: `kubectl --namespace=csi-node describe pod plugin-b` tells why"
	for _, name := range []string{"status", "top", "volumes", "orphans"} {
		if out, _, err := run(t, name); command.ExitCode(err) != 1 || !strings.Contains(err.Error(), describe) {
			t.Errorf("%s prints (%v)\n%s", name, err, out)
		}
	}
	const next = `{"metadata":{"name":"plugin-b2","namespace":"csi-node"},"spec":{"nodeName":"b","containers":[{"name":"csi-node"}]},"status":{"phase":"Running"}},`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(strings.Replace(ending, "[", "["+next, 1)), 0o600))
	if out, _, err := run(t, "status"); strings.Contains(fmt.Sprint(err), "being ended") { // the next one is asked
		t.Errorf("status prints (%v)\n%s", err, out)
	}
}

// A pod's volumes of other drivers are named, and are no failure.
func TestVolumesOfOtherDrivers(t *testing.T) {
	dir := fake(t)
	machine.WriteProgram(t, filepath.Join(dir, "kubectl"), strings.Replace(fakeKubectl, `case "$*" in`, `case "$*" in
*"get pod mixed"*)
	echo '{"metadata":{"name":"mixed","namespace":"default","uid":"u1"},"spec":{"nodeName":"a","volumes":[{"name":"d","persistentVolumeClaim":{"claimName":"data"}},{"name":"n","persistentVolumeClaim":{"claimName":"nfs"}}]}}' ;;
*"get persistentvolumeclaim nfs "*) echo '{"spec":{"volumeName":"pv-nfs"}}' ;;
*"get persistentvolume pv-nfs "*) echo '{"spec":{"csi":{"driver":"nfs.csi.k8s.io","volumeHandle":"nfs#x"}}}' ;;
*"get pod only"*)
	echo '{"metadata":{"name":"only","namespace":"default","uid":"u1"},"spec":{"nodeName":"a","volumes":[{"name":"n","persistentVolumeClaim":{"claimName":"nfs"}}]}}' ;;
`, 1))
	for _, name := range []string{"explain", "retry"} {
		out, errs, err := run(t, name, "default/mixed")
		if err != nil || !strings.Contains(out, "vol-1") || !strings.Contains(errs, "Volume nfs#x is of the driver nfs.csi.k8s.io") {
			t.Errorf("%s prints (%v)\n%s%s", name, err, out, errs)
		}
		if _, _, err := run(t, name, "default/only"); err == nil || !strings.Contains(err.Error(), "no volume that a driver is asked for") {
			t.Errorf("%s of a pod without a volume of csi-node: %v", name, err)
		}
	}
}

// A plugin of another driver that does not answer keeps nobody from being told of this one's volumes.
func TestOtherDriverThatIsDown(t *testing.T) {
	dir := fake(t)
	const second = `{"metadata":{"name":"plugin-c","namespace":"csi-node","labels":{"csi-node.local/driver":"y"}},"spec":{"nodeName":"a","containers":[{"name":"csi-node"}]},"status":{"phase":"Running"}},`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugins"), []byte(strings.Replace(strings.Replace(pods, `"plugin-a",`, `"plugin-a","labels":{"csi-node.local/driver":"x"},`, 1), "[", "["+second, 1)), 0o600))
	machine.WriteProgram(t, filepath.Join(dir, "kubectl"), strings.Replace(fakeKubectl, `case "$*" in`, `case "$*" in
*"plugin-c "*) echo 'error dialing backend' >&2; exit 1 ;;
`, 1))
	if out, errs, err := run(t, "explain", "writer"); err != nil || !strings.Contains(out, "vol-1") {
		t.Errorf("prints (%v)\n%s%s", err, out, errs)
	}
}

func TestWithoutKubectl(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, _, err := run(t, "status"); err == nil || !strings.Contains(err.Error(), "kubectl is not in the PATH") {
		t.Errorf("without kubectl: %v", err)
	}
	for _, args := range [][]string{{"status", "x"}, {"explain"}, {"status", "-o", "xml"}, {"status", "--nonsense"}, {"status", "--node-timeout", "0s"}, {"stauts"}, {"help", "nonsense"}, {"completion", "nonsense"}} {
		if _, _, err := run(t, args...); command.ExitCode(err) != 2 {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// The id of an inline volume, as kubelet makes it: the SHA-256 of "u1s".
func TestInlineHandle(t *testing.T) {
	if got, want := inlineHandle("u1", "s"), "csi-24b04e39f135ae411dbbbfb4838ee7c94c7aaa4a80b4989372237c6bb47f63dd"; got != want {
		t.Errorf("the id is %s, not %s", got, want)
	}
}

func TestWithoutLog(t *testing.T) {
	const log = "E1129 17:45:18.443348   10596 memcache.go:265] \"Unhandled Error\"\n"
	for said, want := range map[string]string{
		log + log + "The connection to the server was refused\n": "The connection to the server was refused\n",
		"first\n" + log + "last":                                 "first\nlast",
		log:                                                      log,
		"":                                                       "",
		"E1129 alone, and Error from server: W1129 is no node": "E1129 alone, and Error from server: W1129 is no node",
	} {
		if got := withoutLog(said); got != want {
			t.Errorf("of %q is left %q, not %q", said, got, want)
		}
	}
}
