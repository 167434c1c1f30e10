package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// cluster is a Kubernetes, in this process's namespaces with its first node.
type cluster struct {
	*run
	*node
	nodes []*node // the first, and one more while there is one
}

func (c *cluster) file(name string) string   { return c.run.file(name) }
func (r *run) file(name string) string       { return filepath.Join(r.Work, name) }
func (r *run) kubeconfig(user string) string { return r.file(user + ".conf") }

// start brings the cluster up until its node is Ready.
func start(ctx context.Context, r *run) (*cluster, error) {
	c := &cluster{run: r, node: firstNode(r)}
	c.nodes = []*node{c.node}
	if err := c.writeKeys(); err != nil {
		return nil, err
	}
	if _, err := c.launch("etcd", "etcd", "--data-dir", c.file("etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380", "--initial-cluster=default=http://127.0.0.1:2380"); err != nil {
		return nil, err
	}
	if _, err := c.launch("kube-apiserver", c.built["kube-apiserver"], "--etcd-servers=http://127.0.0.1:2379",
		"--bind-address=0.0.0.0", "--secure-port=443", "--advertise-address="+nodeIP, "--endpoint-reconciler-type=none",
		"--tls-cert-file="+c.file("apiserver.crt"), "--tls-private-key-file="+c.file("apiserver.key"), "--cert-dir="+c.file("certs"),
		"--token-auth-file="+c.file("tokens.csv"), "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-account-key-file="+c.file("sa.pub"), "--service-account-signing-key-file="+c.file("sa.key"), "--service-account-issuer=https://kubernetes.default.svc",
		"--service-cluster-ip-range="+serviceCIDR, "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP"); err != nil {
		return nil, err
	}
	if err := c.await(ctx, "API server", func(ctx context.Context) error { return c.check(ctx, "get", "--raw", "/readyz") }); err != nil {
		return nil, err
	}
	for _, name := range []string{"kube-controller-manager", "kube-scheduler"} {
		args := []string{"--kubeconfig=" + c.kubeconfig(name), "--bind-address=127.0.0.1", "--leader-elect=false"}
		if name == "kube-controller-manager" {
			args = append(args, "--root-ca-file="+c.file("ca.crt"), "--service-account-private-key-file="+c.file("sa.key"),
				"--node-monitor-grace-period=20s") // four times what kubelet takes to tell that it is there
		}
		if _, err := c.launch(name, c.built[name], args...); err != nil {
			return nil, err
		}
	}
	if err := c.node.start(ctx); err != nil {
		return nil, err
	}
	return c, c.await(ctx, "service account", func(ctx context.Context) error { return c.check(ctx, "get", "serviceaccount", "default") })
}

// deploy brings the plugin up, as a reader of the README would.
func deploy(ctx context.Context, c *cluster) error {
	if err := c.check(ctx, "apply", "--kustomize", "deploy"); err != nil {
		return err
	}
	return c.await(ctx, "the plugin", func(ctx context.Context) error {
		return c.check(ctx, "rollout", "status", "--namespace=csi-node", "daemonset/csi-node", "--timeout=30s")
	})
}

// await repeats check, which says why it is not yet, and says when it has come.
func (r *run) await(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if err := eventually(ctx, func() error { return check(ctx) }); err != nil {
		return fmt.Errorf("%s: %w; see %s", what, err, r.logs())
	}
	say("%s is there", what)
	return nil
}

// check runs kubectl for its success.
func (r *run) check(ctx context.Context, args ...string) error {
	return runQuietly(ctx, r.built["kubectl"], append([]string{"--kubeconfig", r.kubeconfig("admin")}, args...)...)
}

func runQuietly(ctx context.Context, name string, args ...string) error {
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// process is a part of the cluster that runs.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// launch starts a part of the cluster; what it writes goes to its log, after what an earlier one wrote.
func (r *run) launch(name, path string, args ...string) (*process, error) {
	log, err := os.OpenFile(filepath.Join(r.logs(), name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return started(cmd), nil
}

func started(cmd *exec.Cmd) *process {
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		_ = cmd.Wait() // it runs until it is killed; why it ended earlier is in its log
	}()
	return p
}

// stop ends the process by a signal and waits until it is gone.
func (p *process) stop(signal syscall.Signal) error {
	if err := p.cmd.Process.Signal(signal); err != nil {
		return err
	}
	<-p.done
	return nil
}

// writeKeys makes a certificate of the API server, the key of service accounts, and a token for each user.
func (c *cluster) writeKeys() error {
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "e2e-ca"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	server := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kube-apiserver"}, NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(nodeIP), net.ParseIP(serviceIP)}}
	serverKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	accounts, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	caDER, err1 := x509.CreateCertificate(rand.Reader, ca, ca, caKey.Public(), caKey)
	serverDER, err2 := x509.CreateCertificate(rand.Reader, server, ca, serverKey.Public(), caKey)
	serverKeyDER, err3 := x509.MarshalPKCS8PrivateKey(serverKey)
	accountsPublic, err4 := x509.MarshalPKIXPublicKey(accounts.Public())
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	errs := []error{
		c.writePEM("ca.crt", "CERTIFICATE", caDER), c.writePEM("apiserver.crt", "CERTIFICATE", serverDER), c.writePEM("apiserver.key", "PRIVATE KEY", serverKeyDER),
		c.writePEM("sa.key", "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(accounts)), c.writePEM("sa.pub", "PUBLIC KEY", accountsPublic),
	}
	var tokens strings.Builder
	for _, user := range []struct{ file, name, group string }{
		{"admin", "admin", "system:masters"}, {"kube-controller-manager", "system:kube-controller-manager", "system:masters"},
		{"kube-scheduler", "system:kube-scheduler", ""},
		{"kubelet-" + nodeName, "system:node:" + nodeName, "system:nodes"}, {"kubelet-" + secondName, "system:node:" + secondName, "system:nodes"},
	} {
		token := rand.Text()
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", token, user.name, user.file, user.group)
		errs = append(errs, c.writeFile(user.file+".conf", `apiVersion: v1
kind: Config
clusters: [{name: e2e, cluster: {server: "https://`+nodeIP+`:443", certificate-authority: "`+c.file("ca.crt")+`"}}]
users: [{name: user, user: {token: "`+token+`"}}]
contexts: [{name: e2e, context: {cluster: e2e, user: user}}]
current-context: e2e
`))
	}
	return errors.Join(append(errs, c.writeFile("tokens.csv", tokens.String()))...)
}

func (c *cluster) writePEM(name, kind string, der []byte) error {
	return c.writeFile(name, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
}

func (c *cluster) writeFile(name, text string) error {
	return os.WriteFile(c.file(name), []byte(text), 0o600)
}

func (n *node) writeConfiguration() error {
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(n.file("cni"), 0o755),
		n.writeFile("containerd.toml", `version = 2
root = "`+n.file("containerd")+`"
state = "/run/containerd"
[grpc]
  address = "`+n.containerdSocket()+`"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "`+pauseImage+`"
  stream_server_address = "127.0.0.1"
  disable_apparmor = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  # Without CAP_SYS_RESOURCE runc cannot lower oom_score_adj, which every pod's sandbox asks for.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "`+runc+`"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "`+n.file("cni")+`"
`),
		n.writeFile("cni/10-e2e.conflist", `{"cniVersion": "0.4.0", "name": "e2e", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
 "ipam": {"type": "host-local", "dataDir": "`+n.file("cni-addresses")+`", "ranges": [[{"subnet": "`+n.podRange+`"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`),
		n.writeFile("kubelet.yaml", `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false # runs on either version
cgroupDriver: cgroupfs
cgroupRoot: /`+n.cgroup()+`
containerRuntimeEndpoint: unix://`+n.containerdSocket()+`
readOnlyPort: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}} # in a network of its own
authorization: {mode: AlwaysAllow}
resolvConf: ""
clusterDNS: [198.19.0.10] # nobody answers there, and nobody asks
nodeLeaseDurationSeconds: 20 # kubelet tells four times in it that the node is there
failSwapOn: false
makeIPTablesUtilChains: false
serializeImagePulls: false
imageGCHighThresholdPercent: 100 # images come from nowhere again
imageMinimumGCAge: 720h
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
volumePluginDir: /var/lib/kubelet/volumeplugins
syncFrequency: 10s
`))
}

func (n *node) writeFile(name, text string) error {
	return os.WriteFile(n.file(name), []byte(text), 0o600)
}
