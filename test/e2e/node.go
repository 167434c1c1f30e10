package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	nodeName    = "e2e" // of the first node
	nodeIP      = "198.18.0.1"
	secondName  = "e2e-two"
	serviceIP   = "198.19.0.1" // of the API server; there is no kube-proxy, so the first node has it itself
	serviceCIDR = "198.19.0.0/16"
)

// node is a node of the cluster: containerd and kubelet, with files, mounts, processes, network and pool of its own.
type node struct {
	*run
	name, ip, podRange, poolSize string

	init                *process // of its namespaces; nil: the first node is in those of this process
	kubelet, containerd *process
}

func firstNode(r *run) *node {
	return &node{run: r, name: nodeName, ip: nodeIP, podRange: "198.18.1.0/24", poolSize: poolSize}
}

func secondNode(r *run) *node {
	return &node{run: r, name: secondName, ip: "198.18.0.2", podRange: "198.18.2.0/24", poolSize: "4G"}
}

func (n *node) file(name string) string  { return filepath.Join(n.Work, n.name, name) }
func (n *node) containerdSocket() string { return n.file("containerd.sock") }

// poolDevice is the file that has the number of the file system of the node's pool.
const poolDevice = "pool-device"

// cgroup is the directory in each hierarchy below which the node's kubelet makes its own.
func (n *node) cgroup() string {
	if n.name == nodeName {
		return n.Cgroup
	}
	return n.Cgroup + "-" + n.name
}

// pid is that of a process in the node's namespaces.
func (n *node) pid() int {
	if n.init == nil {
		return os.Getpid()
	}
	return n.init.cmd.Process.Pid
}

// root is the node's root directory, as this process reaches it.
func (n *node) root() string { return fmt.Sprintf("/proc/%d/root", n.pid()) }

// prepare makes what the node's namespaces need.
func (n *node) prepare() error {
	if err := os.Mkdir(n.file(""), 0o755); err != nil {
		return err
	}
	return errors.Join(runQuietly(context.Background(), "mkfs.ext4", "-q", "-F", n.file("pool.img"), n.poolSize), makeCgroups(n.cgroup()))
}

// start brings a node up whose namespaces are there, until it is Ready.
func (n *node) start(ctx context.Context) error {
	if err := n.writeConfiguration(); err != nil {
		return err
	}
	if err := n.startContainerd(); err != nil {
		return err
	}
	if err := n.importImages(ctx); err != nil {
		return err
	}
	if err := n.startKubelet(); err != nil {
		return err
	}
	return n.await(ctx, "node "+n.name, func(ctx context.Context) error {
		return n.check(ctx, "wait", "--for=condition=Ready", "--timeout=5s", "node/"+n.name)
	})
}

func (n *node) startContainerd() (err error) {
	n.containerd, err = n.launchHere("containerd", "containerd", "--config", n.file("containerd.toml"))
	return err
}

func (n *node) startKubelet() (err error) {
	n.kubelet, err = n.launchHere("kubelet", n.built["kubelet"], n.kubeletFlags()...)
	return err
}

func (n *node) kubeletFlags() []string {
	return []string{"--config=" + n.file("kubelet.yaml"), "--kubeconfig=" + n.kubeconfig("kubelet-"+n.name), "--hostname-override=" + n.name, "--node-ip=" + n.ip, "--v=4"}
}

// launchHere starts a part of the node in its namespaces.
func (n *node) launchHere(name, path string, args ...string) (*process, error) {
	if n.init == nil {
		return n.launch(name, path, args...)
	}
	enter := []string{"--target", strconv.Itoa(n.pid()), "--mount", "--uts", "--net", "--pid", "--", path}
	return n.launch(name+"-"+n.name, "nsenter", append(enter, args...)...)
}

func (n *node) importImages(ctx context.Context) error {
	if err := n.await(ctx, "containerd", func(ctx context.Context) error {
		return runQuietly(ctx, "ctr", "--address", n.containerdSocket(), "version")
	}); err != nil {
		return err
	}
	images, err := filepath.Glob(filepath.Join(n.images(), "*.tar"))
	if err != nil {
		return err
	}
	for _, image := range images {
		if err := runQuietly(ctx, "ctr", "--address", n.containerdSocket(), "--namespace", "k8s.io", "images", "import", image); err != nil {
			return err
		}
	}
	say("%d images imported", len(images))
	return nil
}

// pidOf finds the process of one of the node's programs. A probe of kubelet's runs the plugin's for a moment, and a child of
// the process is its likeness until it runs a program of its own.
func (n *node) pidOf(program string) (int, error) {
	namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", n.pid()))
	if err != nil {
		return 0, err
	}
	executables, err := filepath.Glob("/proc/[0-9]*/exe") // of this pid namespace, and so of those below it
	if err != nil {
		return 0, err
	}
	for _, exe := range executables {
		dir := filepath.Dir(exe)
		if path, err := os.Readlink(exe); err != nil || path != program {
			continue
		}
		if its, err := os.Readlink(filepath.Join(dir, "ns/pid")); err != nil || its != namespace {
			continue
		}
		line, err := os.ReadFile(filepath.Join(dir, "cmdline")) // empty where the program only begins, or ends
		if arguments := strings.Split(string(line), "\x00"); err != nil || len(arguments) < 2 || arguments[1] == "probe" {
			continue
		}
		status, err := os.ReadFile(filepath.Join(dir, "status"))
		if err != nil {
			continue
		}
		_, parent, _ := strings.Cut(string(status), "\nPPid:\t")
		parent, _, _ = strings.Cut(parent, "\n")
		if path, err := os.Readlink(filepath.Join("/proc", parent, "exe")); err == nil && path == program {
			continue
		}
		return strconv.Atoi(filepath.Base(dir))
	}
	return 0, fmt.Errorf("on node %s no process runs %s", n.name, program)
}

// kill ends one of the node's programs at once; p, if there is one, is what was started for it here, and ends with it.
func (n *node) kill(program string, p *process) error {
	pid, err := n.pidOf(program)
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err == nil && p != nil {
		<-p.done
	}
	return err
}

// addNode starts a second node beside the first: a machine of its own but for the kernel, on one network with it.
func (c *cluster) addNode(ctx context.Context) (*node, error) {
	n := secondNode(c.run)
	if err := n.prepare(); err != nil {
		return nil, err
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env, cmd.Stderr = append(os.Environ(), roleVariable+"=node"), os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start node %s: %w", n.name, err)
	}
	_, notReady := bufio.NewReader(out).ReadString('\n')
	n.init = started(cmd)
	c.nodes = append(c.nodes, n)
	if notReady != nil {
		return n, fmt.Errorf("node %s has ended: %w", n.name, notReady)
	}
	if err := n.join(ctx); err != nil {
		return n, err
	}
	return n, n.start(ctx)
}

// join gives the node an address on the first one's bridge, and each the way to the other's pods.
func (n *node) join(ctx context.Context) error {
	pid := strconv.Itoa(n.pid())
	const inside = "inside" // what stands before the commands in the node's network
	for _, args := range [][]string{
		{"ip", "link", "add", "e2e1", "type", "veth", "peer", "name", "eth0", "netns", pid},
		{"ip", "link", "set", "e2e1", "master", "e2e0", "up"},
		{"ip", "route", "add", n.podRange, "via", n.ip},
		{inside, "ip", "link", "set", "lo", "up"},
		{inside, "ip", "address", "add", n.ip + "/24", "dev", "eth0"},
		{inside, "ip", "link", "set", "eth0", "up"},
		{inside, "ip", "route", "add", "default", "via", nodeIP},
	} {
		if args[0] == inside {
			args = append([]string{"nsenter", "--target", pid, "--net", "--"}, args[1:]...)
		}
		if err := runQuietly(ctx, args[0], args[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// removeNode takes the power from the second node for good, and takes what is left of it from the machine and the cluster.
func (c *cluster) removeNode(ctx context.Context) error {
	n := c.nodes[1]
	c.nodes = c.nodes[:1]
	if err := n.init.stop(syscall.SIGKILL); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return errors.Join(
		eventually(ctx, func() error { return detach(loopsOn(n.file(poolDevice))) }),
		os.Remove(n.file(poolDevice)), // a number is given away again
		runQuietly(ctx, "ip", "route", "delete", n.podRange),
		c.check(ctx, "delete", "node", n.name, "--ignore-not-found"))
}

// beNode plays process 1 of the second node: it makes the namespaces usable, says so, and reaps.
func beNode() error {
	if os.Getpid() != 1 {
		return errors.New("init must be process 1 of its namespace")
	}
	r, err := fromEnvironment()
	if err != nil {
		return err
	}
	n := secondNode(r)
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	if err := errors.Join(syscall.Sethostname([]byte(n.name)), n.mountAll(), forward()); err != nil {
		return err
	}
	fmt.Println("ready")
	for range children {
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 && !errors.Is(err, syscall.EINTR) {
				break
			}
		}
	}
	return nil
}
